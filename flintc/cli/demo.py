"""``flintc demo``: the main job from end to end on the tiny model; needs no GPU and no download."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flintc.cli.ablate import show_ablation
from flintc.cli.common import Debug, Json, emit, progress, say, stderr

if TYPE_CHECKING:
    from flintc.bench.ablation import Ablation
    from flintc.bundle import Bundle
    from flintc.runtime.model import Model

SPEC = "tiny-flint"
#: The demo's tokenizer makes a token of each byte. The interpreter takes seconds a step: a short prompt, a few tokens.
PROMPT = "def "


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(demo_command)


def demo_command(
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 4,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile the tiny model, show what each fusion pass saves, and generate from it with the generated kernels.

    The weights are random: the text shows that the path works, not what Flint can say.
    """
    from flintc import api

    def tell(text: str) -> None:
        if not as_json:
            say(text)

    with tempfile.TemporaryDirectory(prefix="flintc-demo-") as name:
        folder = Path(name)
        tell(f"1. flintc compile {SPEC}: kernels for sm_90, compiled here, with no GPU")
        bundle = _compile(folder / "bundle")
        tell(f"   {len(bundle.plan.launches)} launches served by {len(bundle.plan.kernels)} kernels")
        tell(f"2. flintc ablate {SPEC}: what each pass saves")
        ablation = _ablate()
        if not as_json:
            show_ablation(ablation)
        tell(f"3. flintc synth --spec {SPEC}: a checkpoint in the published form, random weights")
        api.synth(SPEC, folder / "checkpoint", demo_tokenizer=True)
        tell(f"4. flintc generate --backend interpret --prompt {PROMPT!r}: the kernels in Triton's interpreter")
        model = api.load(folder / "checkpoint", bundle=bundle, backend="interpret", spec=SPEC)
        with stderr.status("generating") if stderr.is_terminal else nullcontext():
            made = model.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
            tell(f"   {made.text!r}")
            distance = _distance(model, folder / "checkpoint")
    tell("5. KL from a forward in FP32 over the prompt, in nats: two roundings of one function")
    tell(f"   kernels {distance['kernels']:.1e}, torch at the same rounding points {distance['reference']:.1e}")
    emit(as_json, {"ablation": ablation.to_json(), "generation": asdict(made), "kl_fp32": distance}, lambda: None)


def _compile(folder: Path) -> Bundle:
    from flintc import api

    with progress("compiling") as update:
        return api.compile(SPEC, out=folder, progress=update)


def _ablate() -> Ablation:
    from flintc import api
    from flintc.bench.ablation import ablate
    from flintc.spec import bind_defaults, load_spec

    model = bind_defaults(load_spec(SPEC))
    return ablate(api.run_passes(model), context=model.dims["context"])


def _distance(model: Model, checkpoint: Path) -> dict[str, float]:
    """Mean KL of the next-token distributions from FP32: of ``model``, and of torch at the rounding points."""
    from flintc import api
    from flintc.bench.divergence import kl

    ids = model.tokenizer.encode(PROMPT)
    exact = api.load(checkpoint, backend="reference", spec=SPEC, numerics="fp32").forward(ids)
    rounded = api.load(checkpoint, backend="reference", spec=SPEC).forward(ids)
    return {name: float(kl(exact, x).mean()) for name, x in (("kernels", model.forward(ids)), ("reference", rounded))}
