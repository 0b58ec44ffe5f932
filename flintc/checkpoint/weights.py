"""From the forms in a spec's ``weights:`` to the stored tensors that make up each weight of a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from flintc.errors import CheckpointError, SpecError
from flintc.ir.graph import Graph, Value
from flintc.reference.nvfp4 import Nvfp4
from flintc.spec import BoundModel

Shape = tuple[int, ...]
FileFormat = Literal["safetensors", "gguf"]
#: How many names an error message shows.
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Stored tensors that, one under the other along the output rows, hold one expert of a weight, or all (None)."""

    expert: int | None
    tensors: tuple[str, ...]


#: One way to store a weight.
Form = tuple[Part, ...]


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
    forms = {value: _stored_form(model, value, stored, file_format, where) for value in weight_values(graph)}
    named = [name for form in forms.values() for name in _names(form)]
    missing = [name for name in named if name not in stored]
    unknown = sorted(stored.keys() - set(named))
    if missing:
        remedy = f"it holds unknown {_show(unknown)}" if unknown else "fetch the checkpoint again"
        raise CheckpointError(f"{where}: missing {_show(missing)}", remedy=remedy)
    if unknown:
        remedy = f"with this configuration, {model.spec.name} has no weight of such a name"
        raise CheckpointError(f"{where}: unknown {_show(unknown)}", remedy=remedy)
    return [StoredWeight(value, _pieces(model, value, form, stored, where)) for value, form in forms.items()]


def collect(
    weights: Iterable[tuple[str, Tensor | Nvfp4]], total: int, progress: Callable[[int, int, str], None] | None
) -> dict[str, Tensor | Nvfp4]:
    """All of ``weights`` by name, of which there are ``total``; ``progress`` is told of each.

    On a GPU packed ones are put in the order of kernels: it has time for that while the next ones are read.
    """
    result: dict[str, Tensor | Nvfp4] = {}
    for name, weight in weights:
        if isinstance(weight, Nvfp4) and weight.device.type == "cuda":
            weight = weight.in_kernel_order(give_up=True)
        result[name] = weight
        if progress is not None:
            progress(len(result), total, name)
    return result


def _stored_form(
    model: BoundModel, value: Value, stored: Mapping[str, Shape], file_format: FileFormat, where: str
) -> Form:
    """The form of which anything is stored, else the first; CheckpointError where there are two."""
    # Of more experts than there are tensors, one too many is enough to be missed.
    forms = weight_forms(model, value, file_format, most_experts=len(stored) + 1)
    there = [form for form in forms if any(name in stored for name in _names(form))]
    if len(there) > 1:
        first, second = (next(name for name in _names(form) if name in stored) for form in there[:2])
        message = f"{where}: {value.name} is stored in two forms, as {first} and as {second}"
        raise CheckpointError(message, remedy="keep one of them")
    return (there or forms)[0]


def weight_forms(
    model: BoundModel, value: Value, file_format: FileFormat, most_experts: int = sys.maxsize
) -> list[Form]:
    """The forms a weight may be stored in, in the spec's order, with layer and experts filled in.

    most_experts: where to cut a form that names each expert, since a configuration may claim any number of them.
    """
    assert value.source is not None
    spec = model.spec.weights[value.source]
    forms = []
    for form in spec.safetensors if file_format == "safetensors" else spec.gguf:
        names = (form,) if isinstance(form, str) else form
        each = any("{expert}" in name for name in names)
        experts = range(min(weight_shape(value)[0], most_experts)) if each else (None,)
        forms.append(tuple(Part(e, tuple(n.format(layer=value.layer, expert=e) for n in names)) for e in experts))
    if not forms:
        raise CheckpointError(f"spec {model.spec.name}: weight {value.source} has no {file_format} form")
    return forms


def _names(form: Form) -> list[str]:
    return [name for part in form for name in part.tensors]


def part_shapes(model: BoundModel, value: Value, form: Form) -> list[tuple[Part, list[Shape]]]:
    """The shape that each tensor of ``form`` must have; SpecError where the spec's ``rows`` do not add up."""
    whole = weight_shape(value)
    result = []
    for part in form:
        target = whole if part.expert is None else whole[1:]
        axis = max(len(target) - 2, 0)
        rows = _rows(model, value, len(part.tensors), target[axis])
        result.append((part, [(*target[:axis], n, *target[axis + 1 :]) for n in rows]))
    return result


def _rows(model: BoundModel, value: Value, tensors: int, total: int) -> list[int]:
    """Output rows of each of a part's tensors."""
    assert value.source is not None
    spec, place = model.spec.weights[value.source], model.spec.place("weights", value.source, "rows")
    if tensors == 1:
        return [total]
    rows = [model.dim(count, place) for count in spec.rows] or [total // tensors] * tensors
    if sum(rows) != total:
        raise SpecError(f"{tensors} tensors of {', '.join(map(str, rows))} rows do not make up {total}", place)
    return rows


def _pieces(model: BoundModel, value: Value, form: Form, stored: Mapping[str, Shape], where: str) -> tuple[Piece, ...]:
    """Place the tensors of a complete form; CheckpointError where one is not of the shape it must have."""
    pieces = []
    for part, shapes in part_shapes(model, value, form):
        first = 0
        for name, shape in zip(part.tensors, shapes, strict=True):
            if stored[name] != shape:
                message = f"{where}: tensor {name} is {list(stored[name])}, expected {list(shape)}"
                raise CheckpointError(message, remedy="weights and configuration must be of the same model")
            stop = first + shape[max(len(shape) - 2, 0)]
            pieces.append(Piece(name, slice(first, stop), part.expert))
            first = stop
    return tuple(pieces)


def _show(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:SHOWN])}{more}"
