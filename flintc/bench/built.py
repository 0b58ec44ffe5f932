"""What every measurement on the GPU starts from: the GPU that is here, and a bundle for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flintc import api
from flintc.bench.forward import ForwardBench
from flintc.bundle import Bundle, check_same_model, load_bundle
from flintc.errors import BackendError, BundleError, UsageError
from flintc.runtime.cuda.driver import load_driver
from flintc.spec import BoundModel, bind_defaults, load_spec

#: Base of the rotation where the model has none: its tables are made, and read by nobody.
_THETA = 10000.0


def gpu_here(what: str = "timing", *, remedy: str | None = None) -> str:
    """Target of this machine's GPU, for ``what``; BackendError where it is missing, or the package to launch on it."""
    target = api.gpu_target()
    if target is None:
        raise BackendError(f"{what} needs a GPU of a target that kernels are compiled for", remedy=remedy)
    load_driver()
    return target


def bundle_for(
    model: BoundModel, weights: str, bundle: Path | None, target: str, disable_passes: Sequence[str] = ()
) -> Bundle:
    """The bundle in the folder ``bundle``, else one compiled; UsageError where the folder's is not of ``model``.

    disable_passes: left out of the one compiled; what the folder's leaves out is for the caller to look at.
    """
    if bundle is None:
        return api.compile(model, weights=weights, target=target, disable_passes=disable_passes)
    built = load_bundle(bundle)
    if built.manifest.weights != weights:
        raise UsageError(f"{bundle} is for {built.manifest.weights} weights, not {weights}")
    try:
        check_same_model(built, api.run_passes(model, weights, stop_after="baseline").graph, weights)
    except BundleError as error:
        # The error speaks of a checkpoint, and there is none here.
        name, own = model.spec.name, built.manifest.spec
        message = f"the bundle {bundle} does not run {name} at the sizes asked for: it was compiled from {own}"
        raise UsageError(message) from error
    return built


def step_of(spec: str, weights: str, bundle: Path | None, context: int, batch: int = 1) -> tuple[Bundle, ForwardBench]:
    """The bundle of ``spec`` for this GPU, and its step of ``batch`` sequences of ``context`` tokens.

    bundle: as of :func:`bundle_for`. BackendError without a GPU.
    """
    model, target = bind_defaults(load_spec(spec)), gpu_here()
    built = bundle_for(model, weights, bundle, target)
    return built, ForwardBench(built.plan, built.for_target(target), context, batch, rope_base(model))


def rope_base(model: BoundModel) -> float:
    """Base of the rotation, for tables of synthetic models."""
    return model.numbers.get("rope_theta", _THETA)
