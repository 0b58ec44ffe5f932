"""The metadata of a bound model, in the form its publisher writes into a GGUF file."""

from __future__ import annotations

from flintc.checkpoint.gguf_scan import MetaValue
from flintc.errors import UsageError
from flintc.spec import BoundModel
from flintc.spec.model import StatedSet


def published_metadata(model: BoundModel) -> dict[str, MetaValue]:
    """Every key that the spec reads from a GGUF file, such that binding it gives ``model`` again.

    UsageError where the spec has no GGUF form, or a layer set of ``model`` cannot be stated in it.
    """
    spec = model.spec
    if spec.match.gguf is None:
        raise UsageError(f"spec {spec.name}: no `match.gguf`, so it has no GGUF form")
    keys: dict[str, MetaValue] = {}
    for key, check in spec.checks.gguf.items():
        if check.equals_dimension is not None:
            place = spec.place("checks", "gguf", key, "equals_dimension")
            keys[key] = model.value(check.equals_dimension, place)
        elif check.equals is not None:
            keys[key] = check.equals
    for quantities, values in ((spec.dimensions, model.dims), (spec.numbers, model.numbers)):
        for name, quantity in quantities.items():
            for key in quantity.gguf[:1]:
                keys[key] = values[name]
    for name, layer_set in spec.layer_sets.items():
        if layer_set.gguf is not None:
            keys[layer_set.gguf.key] = _stated(name, layer_set.gguf, model)
    return {"general.architecture": spec.match.gguf, **{f"{spec.match.gguf}.{k}": v for k, v in keys.items()}}


def _stated(name: str, form: StatedSet, model: BoundModel) -> MetaValue:
    """A layer set as a GGUF file states it."""
    members = model.layer_sets[name]
    if form.flags is not None:
        return [(layer in members) == form.where for layer in range(model.layers)]
    if form.indices is not None:
        return [*sorted(members)]
    if form.first is not None and members == frozenset(range(len(members))):
        return len(members)
    raise UsageError(f"layers {sorted(members)} ({name}) cannot be stated as {form.key} in a GGUF file")
