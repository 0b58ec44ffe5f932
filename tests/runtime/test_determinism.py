"""Same seed, same text, on the trained model: over processes, and over batches on the generated kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flintc

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"
FORMS = {"bf16": EXAMPLE, "nvfp4": EXAMPLE / "tiny-flint.gguf"}
#: Writes the tokens of a sampled text and their log-probabilities, to the last bit.
SCRIPT = """
import sys, flintc
made = flintc.load(sys.argv[1], backend="reference").generate("def main():\\n", max_tokens=25, seed=6, stop_ids=())
print(made.token_ids, [p.hex() for p in made.logprobs])
"""


def told(path: Path, hash_seed: str) -> str:
    """What a fresh process writes, whose sets and dictionaries of strings are in another order."""
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout


@pytest.mark.parametrize("form", FORMS)
def test_every_process_writes_the_same_text(form: str) -> None:
    model = flintc.load(FORMS[form], backend="reference")
    made = model.generate("def main():\n", max_tokens=25, seed=6, stop_ids=())
    assert len(set(made.token_ids)) > 10
    here = f"{made.token_ids} {[p.hex() for p in made.logprobs]}\n"
    assert [told(FORMS[form], seed) for seed in ("1", "2")] == [here, here]


@pytest.mark.parametrize("form", FORMS)
def test_a_request_at_every_place_of_a_batch(form: str) -> None:
    """Tokens and log-probabilities are those of the request alone, whatever the size of the batch."""
    model = flintc.load(FORMS[form], backend="reference")
    ids = model.tokenizer.encode("class Parser:\n    def ")
    options = {"max_tokens": 6, "seed": 3, "stop_ids": ()}
    alone = model.generate(ids, **options)
    for size in (1, 2, 5, 9):
        others = [list(range(40 + i, 43 + i)) for i in range(size - 1)]
        each = [{"max_tokens": 2 + i, "seed": i} for i in range(size - 1)]
        for place in {0, size // 2, size - 1}:
            batch = [*others[:place], ids, *others[place:]]
            own = [*each[:place], options, *each[place:]]
            assert model.generate_batch(batch, own)[place] == alone, f"at {place} of {size}"
