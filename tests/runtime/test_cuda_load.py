"""A whole model on the GPU: as near to FP32 as the torch reference, and no row sees another."""

import pytest
import torch

import flintc
from flintc import api

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

IDS = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "checkpoint"
    api.synth("tiny-flint", path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return flintc.load(folder, spec="tiny-flint", device="cuda")


def test_as_near_to_fp32_as_the_reference(folder, model):
    exact = flintc.load(folder, spec="tiny-flint", device="cpu", numerics="fp32").forward(IDS)
    reference = flintc.load(folder, spec="tiny-flint", device="cpu").forward(IDS)
    ours, theirs = ((x - exact).square().mean().sqrt().item() for x in (model.forward(IDS), reference))
    assert 0 < ours <= 1.5 * theirs


def test_a_batch_gives_each_request_what_it_gets_alone(model):
    prompts = [IDS[:40], IDS[5:6], IDS[10:23], *([token] for token in IDS[:7])]  # more requests than slots
    options = [{"seed": i, "max_tokens": 5 + i} for i in range(len(prompts))]
    together = model.generate_batch(prompts, options)
    assert together == [model.generate(p, **o) for p, o in zip(prompts, options, strict=True)]
    assert together[0].path == "cuda, prompt in slices of 8 rows"


def test_a_bundle_gives_what_compiling_on_first_use_gives(folder, model):
    major, minor = torch.cuda.get_device_capability()
    bundle = flintc.compile("tiny-flint", target=f"sm_{major}{minor}")
    loaded = flintc.load(folder, bundle=bundle, device="cuda")
    assert torch.equal(loaded.forward(IDS), model.forward(IDS))
