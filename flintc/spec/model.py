"""The spec as data: what a YAML file may say, and nothing about how it is read or used."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flintc.errors import Place
from flintc.spec.source import Document, KeyPath
from flintc.spec.words import did_you_mean

#: Passes a pipeline may name, in the only order they may be in.
KNOWN_PASSES = (
    "residual-norm",
    "norm-rope-cache",
    "attention-merge",
    "router-expert-gemv",
    "combine-gemv",
    "dependent-launch",
    "split-arrivals",
)

#: Conditions that need no layer set.
LAYER_WORDS = ("first", "last")

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _number_or_text(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PydanticCustomError("quantity", "expected a number or an expression, not {what}", _what(value))
    return value


def _plain(value: Any) -> Any:
    if not isinstance(value, int | float | str | bool | None):
        raise PydanticCustomError("plain", "expected a number, a word, true, false or null, not {what}", _what(value))
    return value


def _optional(value: Any) -> Any:
    if value not in (True, False, "config", "gguf"):
        raise PydanticCustomError("optional", "expected true, false, config or gguf")
    return value


def _tensor_form(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise PydanticCustomError("form", "expected a tensor name, or a list of them to concatenate")
    return value


def _what(value: Any) -> dict[str, str]:
    kinds = {list: "a list", dict: "a mapping", bool: "true or false", type(None): "nothing"}
    return {"what": kinds.get(type(value), f"the {type(value).__name__} {value!r}")}


Whole = Annotated[int, Strict()]
Flag = Annotated[bool, Strict()]
Scalar = Annotated[int | float | str, BeforeValidator(_number_or_text, int | float | str)]
Plain = Annotated[str | int | float | bool | None, BeforeValidator(_plain, str | int | float | bool | None)]
TensorForm = Annotated[str | tuple[str, ...], BeforeValidator(_tensor_form, str | list[str])]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed, str | list[str])]
Names = Annotated[tuple[Name, ...], BeforeValidator(_listed, str | list[str])]


class Entry(BaseModel):
    """Base of every mapping in a spec: frozen, typed strictly, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError("mapping", "expected a mapping, not {what}", _what(data))
        if cls.model_config.get("extra") == "allow":
            return data
        known = {f.alias or name for name, f in cls.model_fields.items()}
        for key in data:
            if key not in known:
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key {word}",
                    {"key": key, "word": repr(key), "remedy": did_you_mean(key, known) or _choices(known)},
                )
        return data


def _choices(known: set[str]) -> str:
    return f"known keys: {', '.join(sorted(known))}"


class Match(Entry):
    """Which checkpoints a spec describes. ``named_only``: never picked by them, only when named."""

    architectures: tuple[str, ...] = ()
    gguf: str | None = None
    named_only: Flag = False


def _shorthand(value: Any) -> Any:
    """A bare number or expression in place of a mapping."""
    if isinstance(value, Quantity | dict):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        message = "expected a number, an expression or a mapping, not {what}"
        raise PydanticCustomError("quantity", message, _what(value))
    return {"value": value}


class Quantity(Entry):
    """A dimension or number: a fixed ``value`` (a number or an expression), or a ``default`` that a checkpoint binds.

    ``config`` and ``gguf`` name the key that binds it; of several that are present, all must agree. Where there
    are none, ``optional`` keeps the default (in both forms, or in the one that it names).
    """

    value: Scalar | None = None
    default: Scalar | None = None
    config: Words = ()
    gguf: Words = ()
    optional: Annotated[bool | Literal["config", "gguf"], BeforeValidator(_optional)] = False

    def is_optional(self, form: str) -> bool:
        """Whether a checkpoint of this form may leave it out."""
        return self.optional in (True, form)

    @model_validator(mode="after")
    def _one_meaning(self) -> Quantity:
        if (self.value is None) == (self.default is None):
            raise PydanticCustomError("meaning", "needs either a value or a `default`")
        if self.value is not None and self.optional:
            raise PydanticCustomError("meaning", "`optional` belongs to a `default`")
        return self


QuantityField = Annotated[Quantity, BeforeValidator(_shorthand, Quantity | int | float | str)]


class StatedSet(Entry):
    """How a checkpoint states a layer set: ``item`` of the list ``of``, ``flags`` that are ``where``, ``indices``, or
    the ``first`` so many. ``absent`` names the layer set that holds where the key is absent.
    """

    item: str | None = None
    of: str | None = None
    flags: str | None = None
    where: Flag = True
    indices: str | None = None
    first: str | None = None
    absent: Name | None = None

    @model_validator(mode="after")
    def _one_form(self) -> StatedSet:
        forms = [f for f in (self.of, self.flags, self.indices, self.first) if f is not None]
        if len(forms) != 1 or (self.item is None) != (self.of is None):
            raise PydanticCustomError("form", "needs exactly one of `item` with `of`, `flags`, `indices`, `first`")
        return self

    @property
    def key(self) -> str:
        """The checkpoint's key that this reads."""
        return self.of or self.flags or self.indices or self.first or ""


class LayerSet(Entry):
    """A named set of layer numbers."""

    default: tuple[Annotated[Whole, Field(ge=0)], ...]
    config: StatedSet | None = None
    gguf: StatedSet | None = None


class Check(Entry):
    """What a checkpoint's key may say; an absent key passes unless it is ``required``.

    ``equals`` a literal, ``equals_dimension`` an expression over dimensions, ``each`` item (or the lone value) one of
    these, ``keys`` a mapping with no others.
    """

    required: Flag = False
    equals: Plain = None
    equals_dimension: str | None = None
    each: tuple[Plain, ...] | None = None
    keys: tuple[str, ...] | None = None

    @property
    def fixed(self) -> bool:
        """Whether the key must equal the literal ``equals`` (which may be null)."""
        return "equals" in self.model_fields_set


class Checks(Entry):
    """What must hold for a checkpoint to be the model described; ``same`` lists layer sets that must be equal."""

    same: tuple[tuple[Name, ...], ...] = ()
    config: dict[str, Check] = {}
    gguf: dict[str, Check] = {}


class Numerics(Entry):
    """Storage types, and the sizes that fix the order of attention's reductions."""

    activations: Literal["bf16"] = "bf16"
    kv_cache: Literal["bf16"] = "bf16"
    accumulate: Literal["f32"] = "f32"
    #: Positions of a chunk: the least that a split-KV partial covers.
    attention_chunk: Annotated[Whole, Field(gt=0, le=1 << 20)] = 512
    #: The same on windowed layers, where a partial is a chunk; None: ``attention_chunk``.
    window_chunk: Annotated[Whole, Field(gt=0, le=1 << 20)] | None = None
    #: Most partials of a row over the whole context: the chunks of a longer one are shared out among so many.
    attention_partials: Annotated[Whole, Field(gt=0, le=1 << 10)] = 66
    #: Positions per page of the KV cache.
    kv_page: Annotated[Whole, Field(gt=0, le=1 << 16)] = 64


def _placeholders(name: str) -> set[str]:
    try:
        return {f for _, f, _, _ in string.Formatter().parse(name) if f is not None}
    except ValueError:
        return {""}


def _form_names(forms: tuple[str | tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(name for form in forms for name in ((form,) if isinstance(form, str) else form))


class WeightSpec(Entry):
    """A weight: its shape, its type, and the forms in which each checkpoint format holds it.

    A form is a tensor name, or a list of names concatenated along the output rows; ``{layer}`` and ``{expert}`` are
    filled in. ``rows`` are the output rows of each name of such a list; without it they are equal.
    ``type: linear`` is BF16 or NVFP4, as the model is compiled.
    """

    shape: Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=3)]
    type: Literal["bf16", "f32", "linear"]
    rows: tuple[Scalar, ...] = ()
    safetensors: tuple[TensorForm, ...] = ()
    gguf: tuple[TensorForm, ...] = ()

    @field_validator("safetensors", "gguf")
    @classmethod
    def _known_placeholders(cls, forms: tuple[str | tuple[str, ...], ...]) -> tuple[str | tuple[str, ...], ...]:
        for name in _form_names(forms):
            if not _placeholders(name) <= {"layer", "expert"}:
                raise PydanticCustomError(
                    "placeholder", "{name}: only {layer} and {expert} are filled in", {"name": repr(name)}
                )
        return forms

    @model_validator(mode="after")
    def _rows_of_each(self) -> WeightSpec:
        for form in (*self.safetensors, *self.gguf):
            if self.rows and not isinstance(form, str) and len(form) != len(self.rows):
                raise PydanticCustomError(
                    "rows", "`rows` has {rows} entries, a form {names}", {"rows": len(self.rows), "names": len(form)}
                )
        return self

    @model_validator(mode="after")
    def _one_scope(self) -> WeightSpec:
        scopes = {"layer" in _placeholders(n) for n in self.names()}
        if len(scopes) > 1:
            raise PydanticCustomError("scope", "either every name holds {layer} or none does")
        return self

    def names(self) -> tuple[str, ...]:
        """Every tensor name of every form."""
        return _form_names((*self.safetensors, *self.gguf))

    @property
    def per_layer(self) -> bool:
        """Whether each layer has its own."""
        return any("layer" in _placeholders(n) for n in self.names())


class Condition(Entry):
    """A part of a layer that is there ``when`` the layer is in a set, or ``unless`` it is."""

    when: str | None = None
    unless: str | None = None

    def holds(self, layer: int, layers: int, sets: Mapping[str, frozenset[int]]) -> bool:
        """Whether the part is there in ``layer`` of ``layers``."""
        words = {"first": frozenset({0}), "last": frozenset({layers - 1})}

        def within(name: str) -> bool:
            return layer in (words.get(name) or sets[name])

        return (self.when is None or within(self.when)) and not (self.unless is not None and within(self.unless))


class OpEntry(Condition):
    """One op of a block: what it reads and binds. Keys beyond the named ones are attributes of the op."""

    model_config = ConfigDict(frozen=True, extra="allow")

    op: str
    name: Name | None = None
    reads: Names = Field(alias="in")
    weight: Name | None = None
    binds: Names = Field(alias="out")

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes as written: numbers, words, dimension expressions, or lists of them."""
        return self.model_extra or {}


class BlockUse(Condition):
    """A block's place in a layer."""

    block: Name


class Step(Entry):
    """A forward step: ``before``, then the blocks of each ``layer`` whose condition holds, ``after``, ``head``."""

    before: tuple[Name, ...] = ()
    layer: tuple[BlockUse, ...]
    after: tuple[Name, ...] = ()
    head: tuple[Name, ...]
    output: Name


class Spec(Entry):
    """A model, written down once. Values are as written: :func:`flintc.spec.bind_defaults` gives them numbers."""

    flintc: Literal[1]
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=64)]
    match: Match = Match()
    dimensions: dict[Name, QuantityField]
    numbers: dict[Name, QuantityField] = {}
    layer_sets: dict[Name, LayerSet] = {}
    checks: Checks = Checks()
    numerics: Numerics = Numerics()
    weights: dict[Name, WeightSpec]
    blocks: dict[Name, Annotated[tuple[OpEntry, ...], Field(min_length=1)]]
    model: Step
    pipeline: tuple[str, ...] = ()

    _document: Document | None = PrivateAttr(default=None)

    @property
    def sha256(self) -> str:
        """Hash of everything the spec says, whatever its files are called and however they are laid out."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def place(self, *path: str | int, key: bool = False) -> Place:
        """Where in its file the value (or key) at ``path`` stands; ``flint.yaml:1:1`` for a spec made in memory."""
        if self._document is None:
            return Place(f"{self.name}.yaml", 1, 1)
        at: KeyPath = tuple(path)
        return self._document.key_place(at) if key else self._document.place(at)
