"""The facade: compile a spec, load a checkpoint. The one module besides the command line that joins rooms.

Rooms are imported inside the functions, so that ``import flintc`` costs next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flintc.errors import BackendError, FlintcWarning, UsageError
from flintc.garbage import uncollected

if TYPE_CHECKING:
    from torch import Tensor

    from flintc.bundle import Bundle
    from flintc.checkpoint import Checkpoint
    from flintc.codegen.aot import Progress
    from flintc.ir.build import Weights
    from flintc.ir.graph import Graph
    from flintc.passes import PipelineRun
    from flintc.reference import Nvfp4
    from flintc.runtime.cuda.executor import CudaExecutor
    from flintc.runtime.executor import Executor
    from flintc.runtime.model import Model
    from flintc.spec import BoundModel, Spec

Backend = Literal["cuda", "interpret", "reference"]
#: Rows of the steps that are captured; the last is the most that one step of the fast path can have.
BATCHES = (1, 2, 4, 8)
MAX_BATCH = BATCHES[-1]
#: Sequences that a loaded model holds at once, unless more are asked for.
SLOTS = 8


def run_passes(
    model: BoundModel, weights: str = "bf16", disable_passes: Sequence[str] = (), stop_after: str | None = None
) -> PipelineRun:
    """The graph of ``model`` after every pass of its spec's pipeline (but for those disabled)."""
    from flintc.building import fused

    return fused(model, _weights(weights), disable_passes, stop_after)


def model_of(
    spec: str | Path | Spec | BoundModel, weights: str | None = None, checkpoint: str | Path | None = None
) -> tuple[BoundModel, Weights]:
    """The model that ``spec`` describes, and the format of its weights: BF16 at the spec's default sizes.

    spec: a file, the name of a shipped one, a loaded spec, or a model that has its sizes already. checkpoint: its sizes
    are taken in place of the defaults, and its format where ``weights`` is None. Raises SpecError, UsageError,
    CheckpointError.
    """
    from flintc.spec import BoundModel, bind_defaults

    if isinstance(spec, BoundModel):
        return spec, _weights(weights or "bf16")
    chosen = _spec(spec)
    if checkpoint is None:
        return bind_defaults(chosen), _weights(weights or "bf16")
    from flintc.checkpoint import open_checkpoint
    from flintc.runtime.hub import find_checkpoint

    opened = open_checkpoint(find_checkpoint(checkpoint))
    return opened.bind(chosen), _weights(weights or opened.weights_format)


def lower(
    spec: str | Path | Spec,
    weights: str | None = None,
    disable_passes: Sequence[str] = (),
    stop_after: str | None = None,
    checkpoint: str | Path | None = None,
) -> Graph:
    """The graph of a spec after its pipeline, or after the pass ``stop_after``.

    spec, weights, checkpoint: see :func:`model_of`. Raises what it raises, and PassError.
    """
    model, format = model_of(spec, weights, checkpoint)
    return run_passes(model, format, disable_passes, stop_after).graph


def compile(
    spec: str | Path | Spec | BoundModel,
    weights: str | None = None,
    target: str | Sequence[str] = "sm_90",
    batch: Sequence[int] = BATCHES,
    disable_passes: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
) -> Bundle:
    """Compile a spec into a bundle; needs no GPU.

    spec, weights, checkpoint: see :func:`model_of`. target: a GPU target such as ``sm_90``, or several. batch: rows
    that are captured, each at most 8. out: folder to write (default: none but the cache's, where every bundle is kept,
    named by all that it depends on).
    Raises SpecError, PassError, UsageError, CheckpointError, CompileError, BundleError, and VerificationError where
    the plan is not proved safe under dependent launch.
    """
    from flintc.building import Recipe
    from flintc.bundle import write_bundle

    with uncollected():
        model, format = model_of(spec, weights, checkpoint)
        recipe = Recipe(model, format, _targets(target), _batches(batch), tuple(disable_passes))
        bundle = recipe.bundle(progress, must_keep=out is None)
    return bundle if out is None else write_bundle(bundle, Path(out))


def load(
    path: str | Path,
    bundle: Bundle | str | Path | None = None,
    device: str | None = None,
    backend: str | None = None,
    numerics: str = "rounded",
    spec: str | Path | Spec | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    context: int | None = None,
    chunk: int | None = None,
    prepared: str | Path | bool | None = None,
    progress: Progress | None = None,
    slots: int = SLOTS,
) -> Model:
    """Load a checkpoint.

    path: a folder of safetensors, a ``.gguf`` file, or a hub id ``org/name[@revision][:file.gguf]``. bundle: from
    :func:`compile`, or its folder; its plan is what runs. device, backend: ``cuda`` (the default where there is a
    GPU), or on the CPU ``reference`` (torch, the default there) or ``interpret`` (the generated kernels in Triton's
    interpreter). numerics: ``rounded``, or ``fp32`` for the oracle (reference only). spec: in place of the one that
    the checkpoint's architecture names. tokenizer, config: folders, or hub ids, in place of the checkpoint's own.
    context: most tokens of one sequence (default: the model's; more is done with a warning). chunk: most tokens of a
    prompt that the GPU takes at once, which bounds how long they delay other requests, and memory. prepared: keep a
    copy of the weights as kernels read them, and load from it next time; in the cache (True) or in a folder. progress:
    told of kernels compiled and of weights loaded. slots: sequences held at once; on the GPU more than 8 decode in
    wide steps where they are enough: docs/prefill.md.

    On a GPU without a bundle, one for this GPU and the checkpoint's sizes is compiled on first use, and cached.

    Raises CheckpointError, BundleError, BackendError, UsageError, CapacityError where the GPU's memory does not do,
    and TokenizerError for ``tokenizer``.
    """
    # Ahead of the threads: what loads a library of its own (YAML, here) while they load torch's waits for those.
    import flintc.bundle  # noqa: F401
    from flintc.runtime.early import early_start, import_torch

    gpu = backend in (None, "cuda") and device in (None, "cuda") and numerics != "fp32"
    # A prepared copy is read in place of the checkpoint's own files.
    with early_start(None if prepared else path, gpu=gpu):
        built = open_bundle(bundle)  # ahead of what imports torch, to run beside what was begun
        import_torch()
        from flintc.checkpoint import open_checkpoint
        from flintc.runtime.hub import find_checkpoint, find_companion
        from flintc.runtime.loading import find_defaults, find_tokenizer, load_weights, prepared_root
        from flintc.runtime.model import Model
        from flintc.runtime.storage import make_tables

    chosen = _backend(backend, device, numerics)
    copies = prepared_root(prepared, numerics)
    own_config = None if config is None else find_companion(config)
    checkpoint = open_checkpoint(find_checkpoint(path), own_config)
    text = find_tokenizer(checkpoint, None if tokenizer is None else find_companion(tokenizer), own_config)
    bound = checkpoint.bind(_spec_for(spec, built, checkpoint))
    limit = _context(context, bound)
    for name, value in (("chunk", chunk), ("slots", slots)):
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}: it must be 1 or more")
    format = checkpoint.weights_format
    on_gpu = _gpu_bundle(built, bound, format, progress) if chosen == "cuda" else None
    graph = on_gpu.plan.graph if on_gpu is not None else _step_graph(chosen, bound, format, built)
    place = "cpu" if on_gpu is None else "cuda"
    weights = load_weights(checkpoint, graph, bound, place, copies, progress, keep_fp32=numerics == "fp32")
    tables = make_tables(graph, bound, limit, place)
    notes = [str(checkpoint.report), *checkpoint.report.notes]
    executor: Executor
    if on_gpu is not None:
        executor = on_device = _cuda_executor(on_gpu, weights, tables, limit, chunk, slots)
        notes.append(on_device.note)
    else:
        executor = _cpu_executor(chosen, graph, weights, tables, numerics, limit, slots)
    defaults = find_defaults(checkpoint, own_config)
    return Model(executor, _vocab(graph), text, defaults, tuple(notes), checkpoint.report)


def synth(
    spec: str | Path | Spec,
    out: str | Path,
    format: str = "safetensors",
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    demo_tokenizer: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a checkpoint of a spec's size with random weights in the published form; returns its files.

    format: ``safetensors`` (a folder, BF16) or ``gguf`` (a file, NVFP4). sizes: dimensions of the spec in place of
    their defaults. demo_tokenizer: add a byte-level tokenizer with a chat template. UsageError where ``out`` exists.
    """
    from flintc.runtime.demo_tokenizer import demo_metadata, write_demo_tokenizer

    model = _resized(_spec(spec), sizes or {})
    if format == "gguf":
        from flintc.checkpoint.synth_gguf import synth_gguf
        from flintc.ir.build import build

        metadata = demo_metadata(_vocab(build(model))) if demo_tokenizer else None
        return [synth_gguf(model, out, seed, extras=metadata, progress=progress)]
    if format != "safetensors":
        raise UsageError(f"unknown checkpoint format {format!r}", remedy="choose safetensors or gguf")
    from flintc.checkpoint.synth import synth_safetensors

    extras = write_demo_tokenizer if demo_tokenizer else None
    return synth_safetensors(model, out, seed, extras=extras, progress=progress)


def open_bundle(bundle: Bundle | str | Path | None) -> Bundle | None:
    """``bundle`` itself, or the one in the folder it names; BundleError where that is none."""
    if isinstance(bundle, str | Path):
        from flintc.bundle import load_bundle

        return load_bundle(Path(bundle))
    return bundle


def _spec(spec: str | Path | Spec) -> Spec:
    from flintc.spec import load_spec

    return load_spec(spec) if isinstance(spec, str | Path) else spec


def _resized(spec: Spec, sizes: Mapping[str, int]) -> BoundModel:
    """The model of ``spec`` with other sizes; layer sets lose the layers that are no longer there."""
    from flintc.spec.bound import bind, bind_defaults, check_layer_sets
    from flintc.spec.words import did_you_mean

    model = bind_defaults(spec)
    free = [name for name, quantity in spec.dimensions.items() if quantity.default is not None]
    for name in sizes:
        if name not in free:
            raise UsageError(f"{spec.name} has no size {name!r} to set", remedy=did_you_mean(name, free))
    layers = bind(spec, sizes, {}, {}).layers
    sets = {name: frozenset(n for n in members if n < layers) for name, members in model.layer_sets.items()}
    resized = bind(spec, sizes, {}, sets)
    check_layer_sets(resized)
    return resized


def _spec_for(spec: str | Path | Spec | None, bundle: Bundle | None, checkpoint: Checkpoint) -> Spec:
    """The spec to bind a checkpoint with: the one asked for, else the bundle's own, else the architecture's."""
    from flintc.spec import shipped_specs, spec_for

    if spec is not None:
        return _spec(spec)
    if bundle is not None and bundle.manifest.spec in shipped_specs():
        shipped = _spec(bundle.manifest.spec)
        if shipped.sha256 == bundle.manifest.spec_sha256:
            return shipped
    match = checkpoint.spec_match
    return spec_for(match.architecture, match.gguf)


def _step_graph(backend: Backend, model: BoundModel, weights: Weights, bundle: Bundle | None) -> Graph:
    """The graph to run: the bundle's, else the model's, fused only where kernels are rendered for it."""
    from flintc.building import fused, unfused
    from flintc.bundle import check_same_model

    graph = unfused(model, weights) if backend == "reference" else fused(model, weights).graph
    if bundle is None:
        return graph
    check_same_model(bundle, graph, weights)
    return bundle.plan.graph


def _vocab(graph: Graph) -> int:
    """Columns of the logits."""
    vocab = graph.values[graph.outputs[0]].type.shape[-1]
    assert isinstance(vocab, int)
    return vocab


def _cpu_executor(
    backend: Backend,
    graph: Graph,
    weights: Mapping[str, Tensor | Nvfp4],
    tables: Mapping[str, Tensor],
    numerics: str,
    context: int,
    slots: int,
) -> Executor:
    if backend == "interpret":
        from flintc.codegen.planner import plan
        from flintc.runtime.interpret_executor import InterpretExecutor

        return InterpretExecutor(plan(graph), weights, tables, context, slots)
    from flintc.runtime.reference_executor import ReferenceExecutor

    return ReferenceExecutor(graph, weights, tables, "fp32" if numerics == "fp32" else "rounded", context, slots)


def _gpu_bundle(bundle: Bundle | None, model: BoundModel, weights: Weights, progress: Progress | None) -> Bundle:
    """What runs ``model`` on the GPU of this machine: the bundle given, else one compiled once and cached."""
    from flintc.building import Recipe, unfused
    from flintc.bundle import check_same_model

    target = gpu_target()
    assert target is not None
    if bundle is not None:
        bundle.for_target(target)
        check_same_model(bundle, unfused(model, weights), weights)
        return bundle
    return Recipe(model, weights, (target,), BATCHES).bundle(progress)


def _cuda_executor(
    bundle: Bundle,
    weights: Mapping[str, Tensor | Nvfp4],
    tables: Mapping[str, Tensor],
    context: int,
    chunk: int | None,
    slots: int,
) -> CudaExecutor:
    from flintc.runtime.cuda.executor import CudaExecutor
    from flintc.runtime.prefill.path import CHUNK

    target = gpu_target()
    assert target is not None
    compiled, batches = bundle.for_target(target), bundle.manifest.batches
    return CudaExecutor(bundle.plan, compiled, weights, tables, context, slots, batches, chunk=chunk or CHUNK)


def _backend(backend: str | None, device: str | None, numerics: str) -> Backend:
    """The backend that ``backend``, ``device`` and ``numerics`` ask for, if together they make sense."""
    if numerics not in ("rounded", "fp32"):
        raise UsageError(f"numerics is {numerics!r}", remedy="choose rounded or fp32")
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"device is {device!r}", remedy="choose cpu or cuda")
    match backend or _default_backend(device, numerics):
        case "reference":
            chosen: Backend = "reference"
        case "interpret":
            chosen = "interpret"
        case "cuda":
            chosen = "cuda"
        case unknown:
            raise UsageError(f"unknown backend {unknown!r}", remedy="choose cuda, interpret or reference")
    if chosen != "reference" and numerics == "fp32":
        raise UsageError("kernels compute at the rounding points", remedy="use the reference backend for fp32")
    if device not in (None, "cuda" if chosen == "cuda" else "cpu"):
        raise UsageError(f"the {chosen} backend does not run on {device!r}")
    if chosen == "cuda":
        check_gpu()
    return chosen


def _default_backend(device: str | None, numerics: str) -> str:
    if device == "cuda" or (device is None and numerics == "rounded" and gpu_target()):
        return "cuda"
    return "reference"


def gpu_target() -> str | None:
    """Target of the GPU of this machine; None where there is none, or none that kernels are compiled for."""
    import torch

    from flintc.codegen.aot import TARGETS

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" if f"sm_{major}{minor}" in TARGETS else None


def check_gpu() -> None:
    """BackendError unless this machine has a GPU that kernels are compiled for, and the package that launches them."""
    from flintc.runtime.cuda.driver import load_driver

    if gpu_target() is None:
        raise BackendError(_why_no_gpu(), remedy="choose backend reference or interpret")
    load_driver()


def _why_no_gpu() -> str:
    import torch

    from flintc.codegen.aot import TARGETS

    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU here that torch can use"
    major, minor = torch.cuda.get_device_capability()
    return f"kernels are compiled for {', '.join(TARGETS)}; {torch.cuda.get_device_name()} here is sm_{major}{minor}"


def _context(context: int | None, model: BoundModel) -> int:
    """Most tokens of a sequence: those asked for, else the model's."""
    most = model.dims["context"]
    if context is None:
        return most
    if context < 1:
        raise UsageError(f"context is {context}: it must be 1 or more")
    if context > most:
        message = f"context {context} exceeds the {most} that the model is made for: expect its text to get worse"
        warnings.warn(message, FlintcWarning, stacklevel=3)
    return context


def _weights(weights: str) -> Weights:
    if weights not in ("bf16", "nvfp4"):
        raise UsageError(f"unknown weight format {weights!r}", remedy="choose bf16 or nvfp4")
    return "bf16" if weights == "bf16" else "nvfp4"


def _batches(batch: Sequence[int]) -> tuple[int, ...]:
    wrong = next((b for b in batch if not 1 <= b <= MAX_BATCH), None)
    if wrong is not None or not batch:
        raise UsageError(f"batch sizes are {list(batch)}: each must lie between 1 and {MAX_BATCH}")
    return tuple(sorted(set(batch)))


def _targets(target: str | Sequence[str]) -> tuple[str, ...]:
    from flintc.codegen.aot import TARGETS

    targets = (target,) if isinstance(target, str) else tuple(target)
    wrong = next((t for t in targets if t not in TARGETS), None)
    if wrong is not None or not targets:
        message = "no target is named" if wrong is None else f"unknown target {wrong!r}"
        raise UsageError(message, remedy=f"choose from {', '.join(TARGETS)}")
    return targets
