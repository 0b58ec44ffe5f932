"""The config.json of a bound model, in the form its publisher writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flintc.spec import BoundModel
from flintc.spec.model import Check, StatedSet


def published_config(model: BoundModel) -> dict[str, Any]:
    """Every key that the spec reads from a config.json, such that binding it gives ``model`` again."""
    spec = model.spec
    config: dict[str, Any] = {"architectures": list(spec.match.architectures), "dtype": "bfloat16"}
    for key, check in spec.checks.config.items():
        if check.equals is not None:
            _put(config, key, check.equals)
    for quantities, values in ((spec.dimensions, model.dims), (spec.numbers, model.numbers)):
        for name, quantity in quantities.items():
            for key in quantity.config[:1]:
                _put(config, key, values[name])
    for name, layer_set in spec.layer_sets.items():
        if layer_set.config is not None:
            stated = _stated(layer_set.config, model.layer_sets[name], model.layers, spec.checks.config)
            _put(config, layer_set.config.key, stated)
    return config


def _put(config: dict[str, Any], key: str, value: object) -> None:
    """Set a key; a dotted one inside nested mappings."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


def _stated(form: StatedSet, members: frozenset[int], layers: int, checks: Mapping[str, Check]) -> object:
    """A layer set as a config.json states it."""
    if form.indices is not None:
        return sorted(members)
    if form.first is not None:
        return len(members)
    if form.flags is not None:
        return [(layer in members) == form.where for layer in range(layers)]
    allowed = checks[form.of or ""].each or ()
    other = next(word for word in allowed if word != form.item)
    return [form.item if layer in members else other for layer in range(layers)]
