"""Same seed, same text, on the GPU: over processes, places in a batch and batch sizes, and as the CPU would choose."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

import flintc
from flintc.runtime.model import Model
from flintc.runtime.sampling import SamplingParams, sample

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
FORMS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}
#: Prompts and texts together stay below what is worth a path of its own for prompts: all of it runs as steps.
PROMPTS = ("def main():\n", "import os\n", "class Parser:\n", "    def test_", "# The ", "from ", "return ", "try:\n")
#: How far logits of rounded forwards may be apart where two tokens are close: above what 99.9 % of positions show.
NEAR_TIE = 0.5
SCRIPT = """
import sys, flintc
made = flintc.load(sys.argv[1], device="cuda").generate("def main():\\n", max_tokens=30, seed=6, stop_ids=())
print(made.token_ids, [p.hex() for p in made.logprobs])
"""


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(form: str) -> Model:
    return flintc.load(FORMS[form], device="cuda")


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_every_process_writes_the_same_text(form: str, model: Model, hash_seed: str) -> None:
    made = model.generate("def main():\n", max_tokens=30, seed=6, stop_ids=())
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(FORMS[form])]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{made.token_ids} {[p.hex() for p in made.logprobs]}\n"


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_request_at_every_place_of_a_batch(model: Model, size: int) -> None:
    """Tokens and log-probabilities are those of the request alone; the others come and go beside it."""
    ids = model.tokenizer.encode("class Parser:\n    def ")
    options = {"max_tokens": 20, "seed": 3, "stop_ids": ()}
    alone = model.generate(ids, **options)  # type: ignore[arg-type]
    others = [list(range(40 + i, 43 + 4 * i)) for i in range(size - 1)]
    each = [{"max_tokens": 3 + 5 * i, "seed": i, "top_k": (20, 0, 64)[i % 3]} for i in range(size - 1)]
    for place in range(size):
        batch = [*others[:place], ids, *others[place:]]
        own = [*each[:place], options, *each[place:]]
        assert model.generate_batch(batch, own)[place] == alone, f"at {place} of {size}"  # type: ignore[arg-type]


def test_streams_side_by_side(model: Model) -> None:
    """Each finds the inputs of its next step overwritten by the other's, and says so to the GPU."""
    asked = [(prompt, {"max_tokens": 20, "seed": seed, "stop_ids": ()}) for seed, prompt in enumerate(PROMPTS[:2])]
    streams = [model.stream(prompt, **options) for prompt, options in asked]  # type: ignore[arg-type]
    made = zip(*zip(*streams, strict=True), strict=True)
    for tokens, (prompt, options) in zip(made, asked, strict=True):
        alone = model.generate(prompt, **options)  # type: ignore[arg-type]
        assert tuple(token.id for token in tokens) == alone.token_ids


@pytest.mark.parametrize("top_k", [20, 64, 65, 0])
def test_tokens_are_those_that_the_cpu_would_choose(model: Model, top_k: int) -> None:
    """The sampler in the graph, or torch beside it, against the same logits sampled on the CPU."""
    params = SamplingParams(temperature=1.3, top_p=0.97, top_k=top_k, seed=2**63 + 5)
    options = {"temperature": 1.3, "top_p": 0.97, "top_k": top_k, "seed": 2**63 + 5, "max_tokens": 30}
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    for ids, made in zip(prompts, model.generate_batch(prompts, stop_ids=(), **options), strict=True):  # type: ignore[arg-type]
        logits = model.forward([*ids, *made.token_ids])[len(ids) - 1 : -1]
        positions = list(range(len(ids), len(ids) + len(made.token_ids)))
        want = sample(logits, [params] * len(positions), positions, model.sampled_vocab)
        assert made.token_ids == tuple(want.ids.tolist())
        assert made.logprobs == pytest.approx(want.logprobs.tolist(), abs=2e-6)


def test_greedy_text_departs_from_the_cpus_at_a_near_tie_only(form: str, model: Model) -> None:
    """Kernels and torch sum in other orders, so one text is not promised; what is, is that both are the model's."""
    cpu = flintc.load(FORMS[form], backend="reference")
    count = 25
    prompts = [cpu.tokenizer.encode(text) for text in PROMPTS]
    options = {"max_tokens": count, "temperature": 0.0, "stop_ids": ()}
    here, there = (m.generate_batch(prompts, **options) for m in (cpu, model))  # type: ignore[arg-type]
    common = 0
    for ids, ours, theirs in zip(prompts, here, there, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        common += same
        if same < count:
            logits = cpu.forward([*ids, *ours.token_ids[:same]])[-1]
            assert logits[ours.token_ids[same]] - logits[theirs.token_ids[same]] < NEAR_TIE
    assert common > len(prompts) * count // 2
