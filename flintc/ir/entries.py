"""What a spec's op entries say, checked against the definitions of the ops."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType

from flintc.errors import SpecError
from flintc.ir.graph import Attr
from flintc.ir.ops import OPS, OpDef
from flintc.spec import BoundModel, OpEntry, Spec
from flintc.spec.words import did_you_mean

#: Ports that the builder fills from the step itself.
GIVEN_PORTS = ("positions", "seqs", "block_table", "table")
#: Ports that `weight:` fills.
WEIGHT_PORTS = ("weight", "sinks")

#: Names that stand for what every step is given; no op binds them. `cache` is bound by `kv_write` alone.
RESERVED = ("ids", "positions", "seqs", "block_table", "rope_table")

#: An attribute's key in a spec, where it differs from its name: `out` there is what an op binds.
_SPELLED = {"out": "out_dtype"}

Path = tuple[str | int, ...]


def operands(entry: OpEntry) -> tuple[str, ...]:
    """Input ports of an entry in order, an optional weight port only where the entry has a weight."""
    ports = OPS[entry.op].inputs
    return tuple(p.removesuffix("?") for p in ports if not p.endswith("?") or entry.weight is not None)


def attribute_keys(definition: OpDef) -> tuple[str, ...]:
    """Keys that an entry of this op may give its attributes by."""
    return tuple(_SPELLED.get(name, name) for name in definition.attrs)


def check_entries(spec: Spec) -> None:
    """Check every op of every block, used or not: kind, number of operands, weight, attribute names."""
    for block, entries in spec.blocks.items():
        for i, entry in enumerate(entries):
            _check_entry(spec, entry, ("blocks", block, i))


def _check_entry(spec: Spec, entry: OpEntry, path: Path) -> None:
    if entry.op not in OPS:
        raise SpecError(f"unknown op {entry.op!r}", spec.place(*path, "op"), remedy=did_you_mean(entry.op, OPS))
    definition = OPS[entry.op]
    keys = attribute_keys(definition)
    for key in entry.attributes:
        if key not in keys:
            near = did_you_mean(key, (*keys, "op", "name", "in", "weight", "out", "when", "unless"))
            raise SpecError(f"{entry.op} has no attribute {key!r}", spec.place(*path, key, key=True), remedy=near)
    for name, default in definition.attrs.items():
        if isinstance(default, EllipsisType) and _SPELLED.get(name, name) not in entry.attributes:
            raise SpecError(f"{entry.op} needs the attribute {_SPELLED.get(name, name)!r}", spec.place(*path))
    if entry.op == "rope" and "rope_theta" not in spec.numbers:
        raise SpecError("rope needs the number 'rope_theta'", spec.place(*path), remedy="add it to `numbers:`")
    _check_operands(spec, entry, path)


def _check_operands(spec: Spec, entry: OpEntry, path: Path) -> None:
    ports = OPS[entry.op].inputs
    bare = [p.removesuffix("?") for p in ports]
    if entry.weight is not None and not any(p in WEIGHT_PORTS for p in bare):
        raise SpecError(f"{entry.op} takes no weight", spec.place(*path, "weight", key=True))
    if entry.weight is None and "weight" in bare:
        raise SpecError(f"{entry.op} needs a `weight`", spec.place(*path))
    read = [p for p in bare if p not in GIVEN_PORTS and p not in WEIGHT_PORTS]
    if len(entry.reads) != len(read):
        message = f"{entry.op} reads {', '.join(read)}; {len(entry.reads)} values are given"
        raise SpecError(message, spec.place(*path, "in"))
    made = OPS[entry.op].outputs
    if len(entry.binds) != len(made):
        message = f"{entry.op} makes {', '.join(made)}; {len(entry.binds)} names are bound"
        raise SpecError(message, spec.place(*path, "out"))
    for name in entry.binds:
        if name in RESERVED or (name == "cache") != (entry.op == "kv_write") or entry.binds.count(name) > 1:
            raise SpecError(f"{entry.op} cannot bind {name!r} here", spec.place(*path, "out"))


def read_attributes(model: BoundModel, entry: OpEntry, path: Path) -> Mapping[str, Attr]:
    """Every attribute of the entry's op: as given, with dimension expressions evaluated, or its default."""
    result: dict[str, Attr] = {}
    for name, default in OPS[entry.op].attrs.items():
        key = _SPELLED.get(name, name)
        if key not in entry.attributes:
            assert not isinstance(default, EllipsisType)
            result[name] = default
        else:
            word = isinstance(default, str)
            result[name] = _attribute(model, entry.attributes[key], word, (*path, key))
    return result


def _attribute(model: BoundModel, given: object, word: bool, path: Path) -> Attr:
    place = model.spec.place(*path)
    if isinstance(given, list | tuple):
        return tuple(_index(model, item, (*path, i)) for i, item in enumerate(given))
    if given is None or isinstance(given, bool) or (word and isinstance(given, str)):
        return given
    if isinstance(given, int | float | str):
        return model.value(given, place)
    raise SpecError(f"{path[-1]} must be a number, a word or a list", place)


def _index(model: BoundModel, given: object, path: Path) -> int:
    place = model.spec.place(*path)
    value = model.value(given, place) if isinstance(given, int | str) and not isinstance(given, bool) else given
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"must be a whole number, not {value!r}", place)
    return value
