"""A spec that shares no name with Flint, without sinks, shared expert and dense layers: its kernels and its reference.

Softmax router without renormalisation, windows on other layers, six query heads on three key heads, and no power of
two among the sizes.
"""

from __future__ import annotations

from pathlib import Path

import flintc
from flintc import api
from flintc.bench.divergence import kl

OTHER = Path(__file__).parents[1] / "data" / "other.yaml"
#: Past the window of 10, past a chunk of 8, and over two slices of rows.
IDS = list(range(5, 17))


def test_another_model_runs_on_generated_kernels_and_on_the_reference(tmp_path: Path) -> None:
    api.synth(OTHER, tmp_path / "checkpoint", sizes={"layers": 2})
    exact = flintc.load(tmp_path / "checkpoint", spec=OTHER, numerics="fp32").forward(IDS)
    reference = flintc.load(tmp_path / "checkpoint", spec=OTHER).forward(IDS)
    model = flintc.load(tmp_path / "checkpoint", spec=OTHER, backend="interpret")
    kernels = model.forward(IDS)
    far = kl(exact, reference).mean()
    assert far > 0
    assert kl(exact, kernels).mean() <= 1.5 * far
    # Kernels and reference round at the same places: nearer to each other than either is to FP32.
    assert kl(reference, kernels).mean() < far / 10
    assert model.generate(IDS[:1], max_tokens=1, temperature=0.0).path == "interpret"
