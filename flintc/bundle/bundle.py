"""A bundle: a plan and its compiled kernels, in memory or in a folder. Data only: nothing in it is executed here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from flintc.bundle.folder import MANIFEST, PLAN, Folder, open_folder, write_folder
from flintc.bundle.manifest import FileRecord, KernelRecord, Manifest, parse_manifest
from flintc.errors import BundleError, VerificationError
from flintc.ir.plan import CompiledKernel, Plan
from flintc.ir.serialize import plan_from_json, plan_to_json
from flintc.ir.verify import verify
from flintc.safety import check_plan


@dataclass(frozen=True, slots=True)
class Origin:
    """What a bundle was built from: the spec's name and hash, the weights' format, the passes, the batch sizes."""

    spec: str
    spec_sha256: str
    weights: Literal["bf16", "nvfp4"]
    pipeline: tuple[str, ...]
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Bundle:
    """A plan with its kernels. ``path`` is the folder it lies in, None while it is in memory only."""

    plan: Plan
    manifest: Manifest
    compiled: Mapping[tuple[str, str], CompiledKernel]
    path: Path | None = None

    def for_target(self, target: str) -> dict[str, CompiledKernel]:
        """Compiled kernels by name; BundleError naming what the bundle was built for, if not for ``target``."""
        if target not in self.manifest.targets:
            raise BundleError(
                f"the bundle {self.path or self.manifest.spec} was built for {', '.join(self.manifest.targets)}, "
                f"not for {target}",
                # Whose sizes its plan has, a bundle does not know.
                remedy=f"flintc compile {self.manifest.spec} --weights {self.manifest.weights} --target {target}, "
                "with --for CHECKPOINT if this bundle was made so",
            )
        return {name: c for (name, built_for), c in self.compiled.items() if built_for == target}

    def cubin(self, kernel: str, target: str) -> bytes:
        """Machine code of one kernel of the plan; BundleError as for :meth:`for_target`."""
        return self.for_target(target)[kernel].cubin

    def files(self) -> dict[str, bytes]:
        """Every file of the bundle's folder, by name relative to it."""
        return {**_content(self.plan, self.compiled), MANIFEST: self.manifest.to_bytes()}


def build_bundle(plan: Plan, compiled: Mapping[tuple[str, str], CompiledKernel], origin: Origin) -> Bundle:
    """Put a bundle together in memory.

    ``compiled`` is keyed by (kernel name, target); VerificationError unless it holds every kernel of the plan for
    each of its targets and nothing else.
    """
    targets = tuple(sorted({target for _, target in compiled}))
    if not targets or set(compiled) != {(name, target) for name in plan.all_kernels for target in targets}:
        raise VerificationError("the compiled kernels are not those of the plan, each for the same targets")
    manifest = Manifest(
        spec=origin.spec,
        spec_sha256=origin.spec_sha256,
        weights=origin.weights,
        pipeline=origin.pipeline,
        batches=origin.batches,
        targets=targets,
        versions={package: version(package) for package in ("flintc", "triton")},
        kernels=tuple(_record(compiled[key]) for key in sorted(compiled)),
        files={
            name: FileRecord(bytes=len(data), sha256=_sha256(data))
            for name, data in sorted(_content(plan, compiled).items())
        },
    )
    return Bundle(plan, manifest, dict(compiled))


def write_bundle(bundle: Bundle, out: Path) -> Bundle:
    """Write ``bundle`` into the folder ``out``, whole or not at all; returns it with its path.

    An older bundle there is replaced. BundleError if ``out`` holds anything else, or cannot be written.
    """
    write_folder(out, bundle.files())
    return replace(bundle, path=out)


def load_bundle(path: Path) -> Bundle:
    """Read the bundle in the folder ``path``.

    BundleError if there is none, it follows another schema, any file is missing, altered, or not part of it, or its
    plan is not proved safe under dependent launch.
    """
    with open_folder(path) as folder:
        manifest = parse_manifest(folder.read(MANIFEST), str(path / MANIFEST))
        content = _verified(folder, manifest)
    plan = _parse_plan(content[PLAN], path / PLAN)
    expected = {(name, target) for name in plan.all_kernels for target in manifest.targets}
    if {(k.name, k.target) for k in manifest.kernels} != expected:
        raise BundleError(f"the bundle {path} contradicts itself: its manifest and its plan name different kernels")
    try:
        compiled = {(k.name, k.target): _compiled(k, content) for k in manifest.kernels}
    except (KeyError, UnicodeDecodeError) as error:
        raise BundleError(f"the bundle {path} contradicts itself: a kernel without its files: {error}") from error
    bundle = Bundle(plan, manifest, compiled, path)
    if bundle.files() != {**content, MANIFEST: manifest.to_bytes()}:
        raise BundleError(f"the bundle {path} contradicts itself: its files are not those of its plan")
    return bundle


def _verified(folder: Folder, manifest: Manifest) -> dict[str, bytes]:
    """Content of every file but the manifest, each checked against its hash."""
    found, listed = folder.names(), {MANIFEST, *manifest.files}
    if missing := sorted(listed - found):
        raise BundleError(f"the bundle {folder.path} lacks {missing[0]}", remedy="compile again")
    if extra := sorted(found - listed):
        raise BundleError(f"the bundle {folder.path} holds {extra[0]!r}, which is not part of it")
    content = {name: folder.read(name) for name in manifest.files}
    for name, record in manifest.files.items():
        if len(content[name]) != record.bytes or _sha256(content[name]) != record.sha256:
            raise BundleError(
                f"{folder.path / name} has been altered: it does not match the manifest's hash", remedy="compile again"
            )
    return content


def _parse_plan(data: bytes, path: Path) -> Plan:
    """The plan in ``data``, proved safe to run."""
    try:
        plan = plan_from_json(json.loads(data))
        verify(plan.graph)
        check_plan(plan)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON") from error
    except (BundleError, VerificationError) as error:
        raise BundleError(f"{path} does not describe a plan that can run: {error}") from error
    return plan


def _content(plan: Plan, compiled: Mapping[tuple[str, str], CompiledKernel]) -> dict[str, bytes]:
    """Every file but the manifest."""
    files = {PLAN: json.dumps(plan_to_json(plan), separators=(",", ":")).encode() + b"\n"}
    for name, kernel in plan.all_kernels.items():
        files[f"kernels/{name}.py"] = kernel.source.encode()
    for c in compiled.values():
        record = _record(c)
        files[record.cubin], files[record.ptx] = c.cubin, c.ptx.encode()
    return files


def _record(c: CompiledKernel) -> KernelRecord:
    return KernelRecord(
        name=c.kernel,
        target=c.target,
        entry=c.entry,
        params=c.params,
        num_warps=c.num_warps,
        shared_bytes=c.shared_bytes,
        registers=c.registers,
        spill_stores=c.spill_stores,
        spill_loads=c.spill_loads,
    )


def _compiled(record: KernelRecord, content: Mapping[str, bytes]) -> CompiledKernel:
    return CompiledKernel(
        kernel=record.name,
        target=record.target,
        entry=record.entry,
        params=record.params,
        num_warps=record.num_warps,
        shared_bytes=record.shared_bytes,
        registers=record.registers,
        spill_stores=record.spill_stores,
        spill_loads=record.spill_loads,
        cubin=content[record.cubin],
        ptx=content[record.ptx].decode(),
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
