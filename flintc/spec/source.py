"""YAML text -> plain data that remembers where each part of it stands.

PyYAML parses; what its nodes are turned into is decided here: only mappings with string keys, sequences and plain
scalars, each key once, within bounds on size, depth and alias expansion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flintc.errors import Place, SpecError, UsageError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
#: Nodes of the document with every alias written out.
MAX_NODES = 20_000

KeyPath = tuple[str | int, ...]

_SCALAR_TAGS = {f"tag:yaml.org,2002:{t}" for t in ("str", "int", "float", "bool", "null")}


@dataclass(frozen=True, slots=True)
class Document:
    """The data of a spec file. ``keys`` and ``values`` hold the place of each key and value by its path."""

    file: str
    data: dict[str, Any]
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Place of the value at ``path``, or of the nearest value around it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                return self.values[path[:end]]
        return Place(self.file, 1, 1)

    def key_place(self, path: KeyPath) -> Place:
        """Place of the key at ``path``; of its value where it has no key."""
        return self.keys.get(path) or self.place(path)

    def over(self, base: Document) -> Document:
        """This document laid over ``base``: mappings merge key by key, anything else replaces."""
        merged = Document(self.file, {}, {}, {(): self.place(())})
        merged.data.update(_merge(base, self, (), merged))
        return merged


def _merge(base: Document, top: Document, path: KeyPath, into: Document) -> dict[str, Any]:
    below, above = _at(base.data, path), _at(top.data, path)
    result: dict[str, Any] = {}
    for key in (*below, *(k for k in above if k not in below)):
        here = (*path, key)
        owner = top if key in above else base
        into.keys[here], into.values[here] = owner.key_place(here), owner.place(here)
        if isinstance(below.get(key), dict) and isinstance(above.get(key), dict):
            result[key] = _merge(base, top, here, into)
        else:
            result[key] = above[key] if key in above else below[key]
            _copy_places(owner, here, into)
    return result


def _at(data: Any, path: KeyPath) -> dict[str, Any]:
    for key in path:
        data = data[key]
    return data  # type: ignore[no-any-return]


def _copy_places(source: Document, path: KeyPath, into: Document) -> None:
    def walk(value: Any, here: KeyPath) -> None:
        if here in source.keys:
            into.keys[here] = source.keys[here]
        into.values[here] = source.place(here)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            walk(item, (*here, key))

    value: Any = source.data
    for key in path:
        value = value[key]
    walk(value, path)


def read_document(path: Path) -> Document:
    """Read and compose one YAML file. SpecError names the place of whatever is wrong with it."""
    return parse_document(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"larger than {MAX_BYTES >> 20} MiB: not a spec", Place(file, 1, 1))
    if b"\0" in raw:
        raise SpecError("a binary file, not YAML text", Place(file, 1, 1))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        raise SpecError("not UTF-8 text", _place_after(before, file)) from None


def _place_after(text: str, file: str) -> Place:
    return Place(file, text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1)


def parse_document(text: str, file: str) -> Document:
    """Compose YAML ``text``; ``file`` is the name that errors carry."""
    try:
        root = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)
        raise SpecError(f"not YAML: {error.problem or error.context}", place) from None
    except yaml.reader.ReaderError as error:
        raise SpecError("not YAML: a control character", _place_after(text[: error.position], file)) from None
    if root is None:
        raise SpecError("the file is empty", Place(file, 1, 1))
    if not isinstance(root, yaml.MappingNode) or root.tag != "tag:yaml.org,2002:map":
        raise SpecError("not a spec: expected a mapping of keys such as `name:` and `blocks:`", _place(root, file))
    document = Document(file, {})
    document.data.update(_Builder(document).mapping(root, ()))
    return document


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


class _Composer(yaml.SafeLoader):
    """PyYAML's composer with a bound on depth, so that hostile nesting cannot exhaust the stack."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None,
                None,
                f"nested deeper than {MAX_DEPTH} levels",
                self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Builder:
    """Turns composed nodes into plain data, recording places in ``document``."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0
        self.scalars = yaml.constructor.SafeConstructor()

    def error(self, message: str, node: yaml.Node) -> SpecError:
        return SpecError(message, _place(node, self.document.file))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        # An alias is the same node met again; a node that holds itself exceeds the depth bound.
        self.count += 1
        if self.count > MAX_NODES or len(path) > MAX_DEPTH:
            raise self.error(f"aliases expand to more than {MAX_NODES} values or nest without end", node)
        self.document.values[path] = _place(node, self.document.file)
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self.document.values[path] = _place(node, self.document.file)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key in result:
                first = self.document.keys[(*path, key)]
                raise self.error(f"duplicate key {key!r}, first given on line {first.line}", key_node)
            self.document.keys[(*path, key)] = _place(key_node, self.document.file)
            result[key] = self.value(value_node, (*path, key))
        return result

    def key(self, node: yaml.Node) -> str:
        if node.tag == "tag:yaml.org,2002:merge":
            raise self.error("merge keys (<<) are not supported", node)
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            raise self.error("a key must be a plain word; quote it if it looks like something else", node)
        return str(node.value)

    def scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            kind = node.tag.rpartition(":")[2]
            raise self.error(f"a value of type {kind!r} is not supported; quote it if it is meant as text", node)
        try:
            value = self.scalars.construct_object(node)
        except (ValueError, KeyError, yaml.YAMLError):
            raise self.error(f"{node.value!r} is not a value of the stated type", node) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{node.value} is not a finite number", node)
        return value  # type: ignore[no-any-return]
