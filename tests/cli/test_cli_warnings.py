"""A warning of flintc is one line on stderr, and leaves stdout and the exit code alone."""

import json
from pathlib import Path

from flintc.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-flint"


def test_more_context_than_the_model_is_made_for(capsys, monkeypatch):
    monkeypatch.setattr("flintc.api.gpu_target", lambda: None)
    command = ["generate", str(EXAMPLE), "--prompt", "def f(", "--max-tokens", "2", "--context", "4096", "--json"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "flintc: warning: context 4096 exceeds the 2048 that the model is made for: expect its text to get worse"
    ]
    assert json.loads(printed.out)["prompt_tokens"] > 0
