"""From the forms in a spec's ``weights:`` to the stored tensors that make up each weight of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sequence, Sequence
from dataclasses import dataclass
from typing import Literal

from flintc.errors import CheckpointError
from flintc.ir.graph import Graph, Value
from flintc.spec import BoundModel

Shape = tuple[int, ...]
FileFormat = Literal["safetensors", "gguf"]
#: How many names an error message shows.
SHOWN = 4
WRONG_SHAPE = "the weights and their configuration must be of the same model"
WRONG_SHAPE = "the weights and their configuration must be of the same model"
WRONG_SHAPE = "the weights and their configuration must be of the same model"


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tensors that, one under the other along the output rows, hold one expert of a weight, or all (None)."""

    expert: int | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tensors that, one under the other along the output rows, hold one expert of a weight, or all (None)."""

    expert: int | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tensors that, one under the other along the output rows, hold one expert of a weight, or all (None)."""

    expert: int | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor and its place in a weight: output rows ``rows`` of one expert, or of all (None)."""

    tensor: str
    rows: slice
    expert: int | None


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight value of the graph and the pieces that fill it, none missing and none overlapping."""

    value: Value
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> Shape:
        """Shape of the whole weight."""
        return weight_shape(self.value)


def weight_values(graph: Graph) -> list[Value]:
    """The weights of ``graph`` in the order it lists them."""
    return [value for value in graph.values.values() if value.kind == "weight"]


def weight_shape(value: Value) -> Shape:
    """Shape of a weight: no dimension of it is a symbol."""
    return tuple(int(d) for d in value.type.shape)


def find_weights(
    graph: Graph,
    model: BoundModel,
    stored: Mapping[str, Shape],
    file_format: FileFormat,
    where: str,
) -> list[StoredWeight]:
    """For each weight of ``graph``, the pieces among the ``stored`` tensors (name -> shape).

    The first form of the spec that is there is taken. CheckpointError, beginning with ``where``, for a weight
    that is missing, incomplete, there in two forms or of the wrong shape, and for stored tensors that no weight uses.
    """
    weights, missing = [], []
    for value in weight_values(graph):
        forms = weight_forms(model, value, file_format)
        there = [form for form in forms if any(name in stored for name in _names(form))]
        if len(there) > 1:
            raise CheckpointError(
                f"{where}: {value.name} is stored twice: as {_names(there[0])[0]} and as {_names(there[1])[0]}",
                remedy="keep one form of it",
            )
        form = there[0] if there else forms[0]
        absent = [name for name in _names(form) if name not in stored]
        missing += absent
        if not absent:
            pieces = (piece for part in form for piece in _pieces(part, weight_shape(value), stored, where))
            weights.append(StoredWeight(value, tuple(pieces)))
    unknown = stored.keys() - {piece.tensor for weight in weights for piece in weight.pieces}
    if missing:
        remedy = f"unknown tensors it holds: {_show(sorted(unknown))}" if unknown else "fetch the checkpoint again"
        raise CheckpointError(f"{where}: missing {_show(missing)}", remedy=remedy)
    if unknown:
        remedy = f"no weight of {model.spec.name} with this configuration is stored under such a name"
        raise CheckpointError(f"{where}: unknown {_show(sorted(unknown))}", remedy=remedy)
    return weights


def weight_forms(model: BoundModel, value: Value, file_format: FileFormat) -> list[tuple[Part, ...]]:
    """The forms a weight may be stored in, in the spec's order, with layer and experts filled in."""
    assert value.source is not None
    spec = model.spec.weights[value.source]
    forms = []
    for form in spec.safetensors if file_format == "safetensors" else spec.gguf:
        names = (form,) if isinstance(form, str) else form
        each = any("{expert}" in name for name in names)
        experts = range(weight_shape(value)[0]) if each else (None,)
        forms.append(tuple(Part(e, tuple(n.format(layer=value.layer, expert=e) for n in names)) for e in experts))
    if not forms:
        raise CheckpointError(f"spec {model.spec.name}: weight {value.source} has no {file_format} form")
    return forms


def _names(form: Iterable[Part]) -> list[str]:
    return [name for part in form for name in part.tensors]


def _pieces(part: Part, shape: Shape, stored: Mapping[str, Shape], where: str) -> list[Piece]:
    """Place the tensors of ``part`` in a weight of ``shape``; CheckpointError where they do not make it up."""
    target = shape if part.expert is None else shape[1:]
    axis = max(len(target) - 2, 0)
    pieces, rows = [], 0
    for name in part.tensors:
        found = stored[name]
        fits = len(found) == len(target) and (*found[:axis], *found[axis + 1 :]) == (
            *target[:axis],
            *target[axis + 1 :],
        )
        if not fits or (len(part.tensors) == 1 and found != target):
            expected: list[int | str] = list(target)
            if len(part.tensors) > 1:
                expected[axis] = "rows"
            shown = ", ".join(map(str, expected))
            raise CheckpointError(f"{where}: tensor {name} is {list(found)}, expected [{shown}]", remedy=WRONG_SHAPE)
        pieces.append(Piece(name, slice(rows, rows + found[axis]), part.expert))
        rows += found[axis]
    if rows != target[axis]:
        together = " and ".join(part.tensors)
        raise CheckpointError(f"{where}: {together} have {rows} rows, expected {target[axis]}", remedy=WRONG_SHAPE)
    return pieces


def _show(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"
