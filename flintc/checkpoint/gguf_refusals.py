"""What a GGUF file may ask for that flintc does not compute: refused by name, before anything else is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flintc.checkpoint.gguf_scan import GgufFile, MetaValue
from flintc.errors import CheckpointError
from flintc.spec import BoundModel

#: Marks the tensors whose activations are to be quantised to FP4.
FP4_ACTIVATIONS = "general.tensor_extra.prec_a4"

_Test = Callable[[str], bool]
_TENSORS: tuple[tuple[_Test, str], ...] = (
    (lambda name: name.endswith(".input_scale"), "scales activations for quantised arithmetic"),
    (lambda name: "exp_probs_b" in name, "biases the choice of experts"),
)


def check_supported(file: GgufFile) -> None:
    """CheckpointError that names the first tensor or key which asks for another computation than Flint's."""
    for name in file.tensors:
        for matches, meaning in _TENSORS:
            if matches(name):
                raise CheckpointError(
                    f"{file.path}: {name} is not supported: it {meaning}", remedy="use a weight-only NVFP4 file"
                )
    for key, value in file.metadata.items():
        if (key == FP4_ACTIVATIONS or key.startswith(f"{FP4_ACTIVATIONS}.")) and _any_set(value):
            raise CheckpointError(
                f"{file.path}: {key} is set: FP4 activations are not supported", remedy="use a weight-only NVFP4 file"
            )


def check_config(gguf: BoundModel, gguf_file: str, config: BoundModel, config_file: str) -> None:
    """CheckpointError where a config.json describes another model than the GGUF file it is used with."""
    for what in ("dims", "numbers", "layer_sets"):
        ours, theirs = getattr(gguf, what), getattr(config, what)
        for name in ours:
            if not _same(ours[name], theirs[name]):
                raise CheckpointError(
                    f"{config_file}: {name} is {_show(theirs[name])}, in {gguf_file} it is {_show(ours[name])}",
                    remedy="use the config.json of the same model",
                )


def _any_set(value: MetaValue) -> bool:
    return any(value) if isinstance(value, list) else bool(value)


def _same(a: object, b: object) -> bool:
    """Equality; numbers as FP32, which is how GGUF stores them."""
    return np.float32(a) == np.float32(b) if isinstance(a, float) and isinstance(b, float) else a == b


def _show(value: object) -> str:
    return f"layers {sorted(value)}" if isinstance(value, frozenset) else str(value)
