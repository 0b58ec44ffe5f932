"""The manifest of a bundle: what it was built from and for, and the hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from flintc.errors import BundleError

FORMAT = "flintc-bundle"
#: Raised whenever an older flintc could misread a newer bundle, or the reverse.
SCHEMA_VERSION = 6

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: An identifier, so that a kernel's name is also a safe file name.
KernelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")]
TargetName = Annotated[str, StringConstraints(pattern=r"^sm_[0-9]{2,3}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Record):
    """Size in bytes and hash of one file."""

    bytes: Count
    sha256: Sha256


class KernelRecord(_Record):
    """One kernel for one target; the fields are those of :class:`flintc.ir.plan.CompiledKernel`."""

    name: KernelName
    target: TargetName
    entry: str
    params: tuple[str, ...]
    num_warps: Positive
    shared_bytes: Count
    registers: Count
    spill_stores: Count
    spill_loads: Count

    @property
    def cubin(self) -> str:
        """Name of the cubin in the bundle."""
        return f"kernels/{self.name}.{self.target}.cubin"

    @property
    def ptx(self) -> str:
        """Name of the PTX in the bundle."""
        return f"kernels/{self.name}.{self.target}.ptx"


class Manifest(_Record):
    """Everything about a bundle but the plan and the kernels themselves.

    ``files`` covers every file of the bundle except the manifest, which carries its own hash. ``versions`` are those
    of the packages that built the bundle, for the record: none of them is needed to run it.
    """

    format: Literal["flintc-bundle"] = "flintc-bundle"
    schema_version: Literal[6] = 6
    spec: str
    spec_sha256: Sha256
    weights: Literal["bf16", "nvfp4"]
    pipeline: tuple[str, ...]
    batches: tuple[Positive, ...]
    targets: tuple[TargetName, ...]
    versions: Mapping[str, str]
    kernels: tuple[KernelRecord, ...]
    files: Mapping[str, FileRecord]

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's content, and through ``files`` of the whole bundle: equal means the same bundle."""
        return _digest(self.model_dump(mode="json"))

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line per kernel that spills registers."""
        return tuple(
            f"kernel {k.name} spills registers on {k.target}: {k.spill_stores} bytes stored, "
            f"{k.spill_loads} loaded per thread"
            for k in self.kernels
            if k.spill_stores or k.spill_loads
        )

    def to_bytes(self) -> bytes:
        """The one way to write this manifest down."""
        body = self.model_dump(mode="json")
        return _text({**body, "sha256": _digest(body)}).encode()


def parse_manifest(data: bytes, file: str) -> Manifest:
    """Read a manifest; ``file`` names it in errors.

    BundleError where it is no manifest, of another schema, altered, or not what :meth:`Manifest.to_bytes` writes.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not a bundle's manifest: it is not JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BundleError(f"{file} is not a bundle's manifest: it does not say format: {FORMAT}")
    schema = body.get("schema_version")
    if schema != SCHEMA_VERSION or isinstance(schema, bool):
        raise BundleError(
            f"{file} follows bundle schema {schema!r}, this flintc reads schema {SCHEMA_VERSION}",
            remedy="compile the bundle again with this flintc",
        )
    if body.pop("sha256", None) != _digest(body):
        raise BundleError(f"{file} has been altered: its content does not match its own hash", remedy="compile again")
    try:
        manifest = Manifest.model_validate_json(_text(body))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BundleError(f"{file} is not a valid manifest: {place}: {first['msg']}") from error
    if manifest.to_bytes() != data:
        raise BundleError(f"{file} has been altered: it is not written as flintc writes it", remedy="compile again")
    return manifest


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body).encode()).hexdigest()
