"""``flintc demo``: the main job from end to end on the tiny model; needs no GPU and no download."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flintc.cli.common import Debug, Json, emit, progress, stderr, stdout

SPEC = "tiny-flint"
PROMPT = "def main():"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(demo_command)


def demo_command(
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 24,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the tiny model, show what each fusion pass saves, and generate from it with the generated kernels.

    The weights are random: the text shows that the path works, not what Flint can say.
    """
    from flintc import api
    from flintc.bench.ablation import ablate, ablation_table
    from flintc.spec import bind_defaults, load_spec

    def say(text: str) -> None:
        if not as_json:
            stdout.print(text, style="bold", markup=False, highlight=False)

    with tempfile.TemporaryDirectory(prefix="flintc-demo-") as folder:
        say(f"1. flintc compile {SPEC}: kernels for sm_90, compiled here, with no GPU")
        with progress("compiling") as update:
            bundle = api.compile(SPEC, out=Path(folder) / "bundle", progress=update)
        say(f"   {len(bundle.plan.launches)} launches served by {len(bundle.plan.kernels)} kernels")
        say(f"2. flintc ablate {SPEC}: what each pass saves")
        ablation = ablate(api.run_passes(bind_defaults(load_spec(SPEC))), context=500)
        if not as_json:
            stdout.print(ablation_table(ablation))
        say(f"3. flintc synth --spec {SPEC}: a checkpoint in the published form, random weights")
        checkpoint = Path(folder) / "checkpoint"
        api.synth(SPEC, checkpoint, demo_tokenizer=True)
        say(
            f"4. flintc generate --backend interpret --prompt {PROMPT!r}: the generated kernels in Triton's interpreter"
        )
        model = api.load(checkpoint, bundle=bundle, backend="interpret", spec=SPEC)
        with stderr.status("generating") if stderr.is_terminal else nullcontext():
            made = model.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
        oracle = api.load(checkpoint, backend="reference", spec=SPEC)
        same = oracle.generate(PROMPT, max_tokens=max_tokens, temperature=0.0).token_ids == made.token_ids
    say(f"   {made.text!r}")
    say(f"   {'the same' if same else 'not the same'} tokens as the torch reference")
    emit(as_json, {"ablation": ablation.to_json(), "generation": asdict(made), "same_as_reference": same}, lambda: None)
