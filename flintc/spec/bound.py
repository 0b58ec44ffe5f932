"""A spec whose dimensions, numbers and layer sets have values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flintc.errors import Place, SpecError
from flintc.spec.expr import ExprError, Number, evaluate, names_in
from flintc.spec.model import Quantity, Spec
from flintc.spec.words import did_you_mean

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class BoundModel:
    """One model: sizes in elements, numbers as floats, layer sets as layer numbers.

    ``ignored`` are the keys of the checkpoint's metadata that nothing in the spec reads.
    """

    spec: Spec
    dims: Mapping[str, int]
    numbers: Mapping[str, float]
    layer_sets: Mapping[str, frozenset[int]]
    ignored: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.dims["layers"]

    def value(self, text: str | Number, place: Place) -> Number:
        """Value of an expression over dimensions and numbers; SpecError at ``place`` where it has none."""
        names = {**self.dims, **self.numbers} if isinstance(text, str) else {}
        try:
            return evaluate(text, names)
        except ExprError as error:
            near = did_you_mean(error.name, names) if error.name else None
            raise SpecError(str(error), place, remedy=near) from None

    def dim(self, text: str | Number, place: Place) -> int:
        """Value of a dimension expression: a positive whole number."""
        return _whole(str(text), self.value(text, place), place)


def _whole(what: str, value: Number, place: Place) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise SpecError(f"{what} must be a positive whole number, not {value}", place)
    return value


def _place(spec: Spec, section: str, name: str) -> Place:
    """Where a quantity of ``section`` states its value."""
    return spec.place(section, name, "value" if getattr(spec, section)[name].default is None else "default")


def bind(
    spec: Spec,
    given_dims: Mapping[str, int],
    given_numbers: Mapping[str, float],
    layer_sets: Mapping[str, frozenset[int]],
    ignored: tuple[str, ...] = (),
) -> BoundModel:
    """Evaluate every dimension and number; ``given_*`` take the place of defaults."""
    sizes = _resolve(spec, "dimensions", given_dims, {})
    dims = {name: _whole(name, value, _place(spec, "dimensions", name)) for name, value in sizes.items()}
    numbers = {n: float(v) for n, v in _resolve(spec, "numbers", given_numbers, dims).items()}
    return BoundModel(spec, dims, numbers, dict(layer_sets), ignored)


def _resolve(spec: Spec, section: str, given: Mapping[str, Number], outer: Mapping[str, Number]) -> dict[str, Number]:
    """Values of one section in its own order; each may read the others, but not in a circle."""
    quantities: Mapping[str, Quantity] = getattr(spec, section)
    done: dict[str, Number] = dict(given)

    def visit(name: str, trail: tuple[str, ...]) -> Number:
        if name in outer:
            return outer[name]
        if name in done:
            return done[name]
        place = _place(spec, section, name)
        if name in trail:
            circle = " -> ".join((*trail[trail.index(name) :], name))
            raise SpecError(f"{section} depend on each other in a circle: {circle}", place)
        quantity = quantities[name]
        text = quantity.value if quantity.value is not None else quantity.default
        assert text is not None
        try:
            read = {n: visit(n, (*trail, name)) for n in _reads(text)}
            done[name] = evaluate(text, read)
        except ExprError as error:
            raise SpecError(str(error), place) from None
        return done[name]

    return {name: visit(name, ()) for name in quantities}


def _reads(text: str | Number) -> list[str]:
    return sorted(names_in(text)) if isinstance(text, str) else []


def bind_defaults(spec: Spec) -> BoundModel:
    """The model of the spec's own defaults."""
    model = bind(spec, {}, {}, {n: frozenset(s.default) for n, s in spec.layer_sets.items()})
    check_layer_sets(model)
    return model


def check_layer_sets(model: BoundModel) -> None:
    """SpecError where a default layer set names a layer that is not there, or sets that must be equal are not."""
    spec = model.spec
    if model.layers > MAX_LAYERS:
        raise SpecError(f"more than {MAX_LAYERS} layers", spec.place("dimensions", "layers"))
    for name, layers in model.layer_sets.items():
        outside = sorted(n for n in layers if n >= model.layers)
        if outside:
            place = spec.place("layer_sets", name, "default")
            raise SpecError(f"layer {outside[0]} is not among the {model.layers} layers", place)
    for group in spec.checks.same:
        first = model.layer_sets[group[0]]
        for name in group[1:]:
            if model.layer_sets[name] != first:
                message = f"layer sets {group[0]!r} and {name!r} must be equal"
                raise SpecError(message, spec.place("layer_sets", name, "default"))
