"""Rules between the parts of a spec: every name it uses is one it defines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flintc.errors import Place, SpecError
from flintc.spec.expr import ExprError, names_in
from flintc.spec.model import LAYER_WORDS, Condition, Spec
from flintc.spec.words import did_you_mean

#: Dimensions that flintc itself reads by name.
GIVEN_DIMENSIONS = {"layers": "the number of layers", "context": "the most positions a sequence may have"}


def check_spec(spec: Spec, known_passes: Sequence[str]) -> None:
    """Raise SpecError at the first name that nothing defines, or at a pipeline out of order."""
    _check_quantities(spec)
    _check_layer_sets(spec)
    _check_weights(spec)
    _check_blocks(spec)
    _check_step(spec)
    _check_pipeline(spec, known_passes)


def _known(word: str, known: Iterable[str], what: str, place: Place) -> None:
    known = list(known)
    if word not in known:
        raise SpecError(f"unknown {what} {word!r}", place, remedy=did_you_mean(word, known))


def _expression(text: object, known: Iterable[str], place: Place) -> None:
    if isinstance(text, str):
        try:
            names = names_in(text)
        except ExprError as error:
            raise SpecError(str(error), place) from None
        for name in sorted(names):
            _known(name, known, "dimension", place)


def _check_quantities(spec: Spec) -> None:
    for name, meaning in GIVEN_DIMENSIONS.items():
        if name not in spec.dimensions:
            raise SpecError(f"missing dimension {name!r}, {meaning}", spec.place("dimensions", key=True))
    for section, known in (("dimensions", spec.dimensions), ("numbers", {**spec.dimensions, **spec.numbers})):
        for name, quantity in getattr(spec, section).items():
            if section == "numbers" and name in spec.dimensions:
                raise SpecError(f"{name!r} is already a dimension", spec.place(section, name, key=True))
            for text in (quantity.value, quantity.default):
                _expression(text, known, spec.place(section, name))


def _check_layer_sets(spec: Spec) -> None:
    for name, layer_set in spec.layer_sets.items():
        if name in LAYER_WORDS:
            raise SpecError(f"{name!r} already has a meaning", spec.place("layer_sets", name, key=True))
        for form in ("config", "gguf"):
            stated = getattr(layer_set, form)
            if stated is not None and stated.absent is not None:
                place = spec.place("layer_sets", name, form, "absent")
                _known(stated.absent, spec.layer_sets, "layer set", place)
                other = getattr(spec.layer_sets[stated.absent], form)
                if other is not None and other.absent is not None:
                    raise SpecError(f"layer set {stated.absent!r} may itself be absent", place)
    for i, group in enumerate(spec.checks.same):
        for j, name in enumerate(group):
            _known(name, spec.layer_sets, "layer set", spec.place("checks", "same", i, j))
    for form in ("config", "gguf"):
        for key, check in getattr(spec.checks, form).items():
            place = spec.place("checks", form, key, "equals_dimension")
            _expression(check.equals_dimension, spec.dimensions, place)


def _check_weights(spec: Spec) -> None:
    for name, weight in spec.weights.items():
        for i, dimension in enumerate(weight.shape):
            _expression(dimension, spec.dimensions, spec.place("weights", name, "shape", i))
        for i, count in enumerate(weight.rows):
            _expression(count, spec.dimensions, spec.place("weights", name, "rows", i))


def _check_condition(spec: Spec, condition: Condition, *path: str | int) -> None:
    for key in ("when", "unless"):
        word = getattr(condition, key)
        if word is not None:
            _known(word, (*LAYER_WORDS, *spec.layer_sets), "layer set", spec.place(*path, key))


def _check_blocks(spec: Spec) -> None:
    for block, entries in spec.blocks.items():
        for i, entry in enumerate(entries):
            _check_condition(spec, entry, "blocks", block, i)
            if entry.weight is not None:
                _known(entry.weight, spec.weights, "weight", spec.place("blocks", block, i, "weight"))


def _check_step(spec: Spec) -> None:
    for part in ("before", "after", "head"):
        for i, block in enumerate(getattr(spec.model, part)):
            _known(block, spec.blocks, "block", spec.place("model", part, i))
            _check_unconditional(spec, block, part)
    for i, use in enumerate(spec.model.layer):
        _known(use.block, spec.blocks, "block", spec.place("model", "layer", i, "block"))
        _check_condition(spec, use, "model", "layer", i)


def _check_unconditional(spec: Spec, block: str, part: str) -> None:
    for i, entry in enumerate(spec.blocks[block]):
        for key in ("when", "unless"):
            if getattr(entry, key) is not None:
                message = f"`{key}` asks about a layer, but `{part}` runs block {block!r} outside the layers"
                raise SpecError(message, spec.place("blocks", block, i, key, key=True))


def _check_pipeline(spec: Spec, known_passes: Sequence[str]) -> None:
    last = -1
    for i, name in enumerate(spec.pipeline):
        place = spec.place("pipeline", i)
        _known(name, known_passes, "pass", place)
        if name in spec.pipeline[:i]:
            raise SpecError(f"pass {name!r} is listed twice", place)
        position = list(known_passes).index(name)
        if position < last:
            order = ", ".join(known_passes)
            raise SpecError(f"pass {name!r} comes after {spec.pipeline[i - 1]!r}", place, remedy=f"order: {order}")
        last = position
