"""Binding a spec to what a checkpoint says of itself: config.json, or the metadata of a GGUF file.

Nothing is guessed. A dimension or number that the spec leaves open must be in the checkpoint, save where the spec
says ``optional`` (so a config.json without `head_dim` is refused: loaders disagree about its default); what a
checkpoint repeats must agree; what it asks for beyond the spec is refused by name. A null is an absent key for
dimensions, numbers and layer sets, and a value for ``checks``.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flintc.errors import CheckpointError, FlintcError, Place, SpecError
from flintc.spec.bound import MAX_LAYERS, BoundModel, bind
from flintc.spec.expr import Number
from flintc.spec.model import Check, Quantity, Spec, StatedSet

Form = Literal["config", "gguf"]

#: GGUF keys that carry no architecture prefix.
_GGUF_GLOBAL = ("general.", "tokenizer.")

#: Kernels count in 32 bits.
_MAX_SIZE = 2**31 - 1

_ABSENT = object()


def bind_config(spec: Spec, config: Mapping[str, Any], file: str) -> BoundModel:
    """The model that a config.json describes; ``file`` is its name in errors.

    CheckpointError where a key is absent, malformed, contradicts another, or asks for what the spec does not have.
    """
    named = config.get("architectures")
    if spec.match.architectures and named and not set(_strings(named)) & set(spec.match.architectures):
        known = ", ".join(spec.match.architectures)
        raise CheckpointError(f"{file}: architectures is {_show(named)}, spec {spec.name!r} describes {known}")
    return _Binder(spec, "config", config, file).bound()


def bind_gguf(spec: Spec, metadata: Mapping[str, Any], file: str) -> BoundModel:
    """The model that a GGUF file's metadata describes: key -> number, text, boolean or list of them.

    Keys are the file's own, prefix included. CheckpointError as for :func:`bind_config`.
    """
    named = metadata.get("general.architecture")
    if named != spec.match.gguf:
        message = f"{file}: general.architecture is {_show(named)}, spec {spec.name!r} describes {spec.match.gguf!r}"
        raise CheckpointError(message)
    return _Binder(spec, "gguf", metadata, file).bound()


def _strings(value: object) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list | tuple) else []


def _show(value: object) -> str:
    text = "absent" if value is None or value is _ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_FP32_MAX = 3.4028234663852886e38


def _equal(value: object, wanted: object) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and value == wanted


def shortest_fp32(value: float) -> float:
    """The shortest decimal that FP32 rounds to ``value``: 1e-06 for 9.999999974752427e-07.

    GGUF stores numbers in FP32; the decimal that was written is what a spec or a config.json says of the same model.
    A value that is no FP32 number is itself.
    """
    stored = struct.pack("f", value) if abs(value) <= _FP32_MAX else b""
    for digits in range(1, 10):
        decimal = float(f"{value:.{digits}g}")
        if abs(decimal) <= _FP32_MAX and struct.pack("f", decimal) == stored and struct.unpack("f", stored)[0] == value:
            return decimal
    return value


class _Binder:
    """Reads one checkpoint's keys for one spec, remembering which it read."""

    def __init__(self, spec: Spec, form: Form, metadata: Mapping[str, Any], file: str) -> None:
        self.spec, self.form, self.metadata, self.file = spec, form, metadata, file
        self.prefix = f"{spec.match.gguf}." if form == "gguf" else ""
        self.read: set[str] = set()

    def bound(self) -> BoundModel:
        dims = self.quantities("dimensions")
        numbers = self.quantities("numbers")
        model = self.evaluated(dims, numbers, {})
        if model.layers > MAX_LAYERS:
            raise self.error(f"{model.layers} layers; at most {MAX_LAYERS} are supported")
        self.check_fixed(model)
        for key, check in getattr(self.spec.checks, self.form).items():
            self.check(key, check, model)
        sets = self.layer_sets(model.layers)
        return self.evaluated(dims, numbers, sets)

    def evaluated(
        self, dims: Mapping[str, Number], numbers: Mapping[str, Number], sets: Mapping[str, frozenset[int]]
    ) -> BoundModel:
        try:
            whole = {name: value for name, value in dims.items() if isinstance(value, int)}
            return bind(self.spec, whole, {n: float(v) for n, v in numbers.items()}, sets, self.ignored())
        except SpecError as error:
            raise self.error(f"its sizes do not fit spec {self.spec.name!r}: {error.message}") from None

    # Keys

    def error(self, message: str, remedy: str | None = None) -> FlintcError:
        return CheckpointError(f"{self.file}: {message}", remedy=remedy)

    def full_key(self, key: str) -> str:
        return key if self.form == "config" or key.startswith(_GGUF_GLOBAL) else self.prefix + key

    def get(self, key: str) -> Any:
        """The value of ``key`` or ``_ABSENT``; a dotted key of config.json walks nested mappings."""
        full = self.full_key(key)
        if self.form == "gguf":
            self.read.add(full)
            return self.metadata.get(full, _ABSENT)
        self.read.add(full.partition(".")[0])
        value: Any = self.metadata
        for part in full.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return _ABSENT
            value = value[part]
        return value

    def ignored(self) -> tuple[str, ...]:
        return tuple(k for k in self.metadata if k.startswith(self.prefix) and k not in self.read)

    # Dimensions and numbers

    def quantities(self, section: str) -> dict[str, Number]:
        """Values that the checkpoint gives to the open quantities of a section."""
        given: dict[str, Number] = {}
        for name, quantity in getattr(self.spec, section).items():
            if quantity.default is None:
                continue
            found = self.stated(quantity, section)
            if found is not None:
                given[name] = found
            elif getattr(quantity, self.form) and not quantity.is_optional(self.form):
                keys = " or ".join(self.full_key(k) for k in getattr(quantity, self.form))
                raise self.error(f"{keys} is absent", f"add it: it gives {name!r} of the model")
        return given

    def stated(self, quantity: Quantity, section: str) -> Number | None:
        """What the checkpoint says under the quantity's keys, which must agree where there are several."""
        found: dict[str, Number] = {}
        for key in getattr(quantity, self.form):
            value = self.get(key)
            if value is not _ABSENT and value is not None:
                found[self.full_key(key)] = self.number(self.full_key(key), value, section == "dimensions")
        if len(set(found.values())) > 1:
            said = ", ".join(f"{key} is {value}" for key, value in found.items())
            raise self.error(f"{said}: they contradict each other", "remove the wrong one")
        return next(iter(found.values()), None)

    def number(self, key: str, value: object, whole: bool) -> Number:
        kinds, what, most = (int, "whole number", _MAX_SIZE) if whole else (int | float, "number", sys.float_info.max)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= most:
            raise self.error(f"{key} is {_show(value)}, expected a positive {what}, at most {most}")
        return shortest_fp32(value) if self.form == "gguf" and isinstance(value, float) else value

    def check_fixed(self, model: BoundModel) -> None:
        """A dimension or number that the spec fixes must be what the checkpoint says."""
        for section, values in (("dimensions", model.dims), ("numbers", model.numbers)):
            for name, quantity in getattr(self.spec, section).items():
                found = self.stated(quantity, section) if quantity.value is not None else None
                if found is not None and found != values[name]:
                    keys = " or ".join(self.full_key(k) for k in getattr(quantity, self.form))
                    raise self.error(f"{keys} is {found}, spec {self.spec.name!r} has {name} = {values[name]}")

    # Checks

    def check(self, key: str, check: Check, model: BoundModel) -> None:
        value, full = self.get(key), self.full_key(key)
        if value is _ABSENT or (value is None and check.required):
            if check.required:
                raise self.error(f"{full} is absent", "add it: loaders guess differently without it")
            return
        if check.fixed and not _equal(value, check.equals):
            raise self.error(f"{full} is {_show(value)}; only {check.equals!r} is supported")
        if check.equals_dimension is not None:
            place = self.spec.place("checks", self.form, key, "equals_dimension")
            self.check_dimension(full, value, check.equals_dimension, model, place)
        if check.each is not None:
            items = value if isinstance(value, list | tuple) else [value]
            wrong = next((i for i in items if not any(_equal(i, a) for a in check.each)), _ABSENT)
            if wrong is not _ABSENT:
                allowed = " and ".join(repr(a) for a in check.each)
                raise self.error(f"{full} holds {_show(wrong)}; only {allowed} are supported")
        if check.keys is not None and value is not None:
            self.check_keys(full, value, check.keys)

    def check_dimension(self, key: str, value: object, text: str, model: BoundModel, place: Place) -> None:
        try:
            wanted = model.value(text, place)
        except SpecError:
            raise self.error(f"{key} is {_show(value)}, but {text} is not a whole number here") from None
        if not _equal(value, wanted):
            raise self.error(f"{key} is {_show(value)}, which contradicts {text} = {wanted}")

    def check_keys(self, key: str, value: object, known: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {_show(value)}, expected a mapping")
        for inner in value:
            if inner not in known:
                raise self.error(f"{key}.{inner} is not supported", f"known: {', '.join(known)}")

    # Layer sets

    def layer_sets(self, layers: int) -> dict[str, frozenset[int]]:
        sets: dict[str, frozenset[int]] = {}
        pending: list[tuple[str, str]] = []
        for name, layer_set in self.spec.layer_sets.items():
            stated: StatedSet | None = getattr(layer_set, self.form)
            value = self.get(stated.key) if stated is not None else _ABSENT
            if stated is None:
                sets[name] = self.default_set(name, layer_set.default, layers)
            elif value is not _ABSENT and value is not None:
                sets[name] = self.members(stated, value, layers)
            elif stated.absent is not None:
                pending.append((name, stated.absent))
            else:
                raise self.error(f"{self.full_key(stated.key)} is absent", f"add it: it says which layers are {name}")
        for name, other in pending:
            sets[name] = sets[other]
        self.check_same(sets)
        return sets

    def default_set(self, name: str, default: tuple[int, ...], layers: int) -> frozenset[int]:
        if any(n >= layers for n in default):
            raise self.error(f"it has {layers} layers, layer set {name!r} of spec {self.spec.name!r} names more")
        return frozenset(default)

    def check_same(self, sets: Mapping[str, frozenset[int]]) -> None:
        for group in self.spec.checks.same:
            for name in group[1:]:
                differ = sorted(sets[group[0]] ^ sets[name])
                if differ:
                    message = (
                        f"layer {differ[0]} is {{}} but not {{}}: {self.set_key(group[0])} and {self.set_key(name)}"
                    )
                    inside, outside = (group[0], name) if differ[0] in sets[group[0]] else (name, group[0])
                    raise self.error(f"{message.format(inside, outside)} contradict each other")

    def set_key(self, name: str) -> str:
        stated: StatedSet | None = getattr(self.spec.layer_sets[name], self.form)
        return self.full_key(stated.key) if stated is not None else name

    def members(self, stated: StatedSet, value: object, layers: int) -> frozenset[int]:
        key = self.full_key(stated.key)
        if stated.first is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= layers:
                raise self.error(f"{key} is {_show(value)}, expected a count of at most {layers} layers")
            return frozenset(range(value))
        if not isinstance(value, list | tuple):
            raise self.error(f"{key} is {_show(value)}, expected a list")
        if stated.indices is not None:
            return self.indices(key, value, layers)
        if len(value) != layers:
            raise self.error(f"{key} has {len(value)} entries for {layers} layers")
        wanted: object = stated.item if stated.of is not None else stated.where
        kind = str if stated.of is not None else bool
        for i, entry in enumerate(value):
            if not isinstance(entry, kind):
                raise self.error(
                    f"{key}[{i}] is {_show(entry)}, expected {'a word' if kind is str else 'true or false'}"
                )
        return frozenset(i for i, entry in enumerate(value) if entry == wanted)

    def indices(self, key: str, value: Sequence[object], layers: int) -> frozenset[int]:
        found: set[int] = set()
        for i, entry in enumerate(value):
            if isinstance(entry, bool) or not isinstance(entry, int) or not 0 <= entry < layers:
                raise self.error(f"{key}[{i}] is {_show(entry)}, expected a layer number below {layers}")
            found.add(entry)
        return frozenset(found)
