"""``flintc demo``: the main job from end to end on the trained tiny-flint; needs no GPU and no download."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
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
    from flintc.runtime.generation import Generation
    from flintc.runtime.model import Model

Tell = Callable[[str], None]

SPEC = "flint"
#: One token: in the interpreter each row of a step takes seconds.
PROMPT = "import"
#: How many tokens torch goes on for.
LONGER = 16
#: A text as the checkpoint's own sampling draws it.
SAMPLED, SEED, SAMPLED_TOKENS = "def main():\n", 1, 100


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("demo")(demo_command)


def demo_command(
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate with the interpreted kernels.")] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compile a small trained Flint, show what each fusion pass saves, and generate text with the generated kernels.

    Fails (exit 1) where the kernels choose other tokens than torch at the same rounding points.
    """
    from flintc import api
    from flintc.checkpoint.shipped import shipped_checkpoint
    from flintc.errors import VerificationError

    def tell(text: str) -> None:
        if not as_json:
            say(text)

    path = _from_here(shipped_checkpoint())
    tell(f"{path}: a small Flint trained on Python's standard library, {path.stat().st_size / 1e6:.1f} MB of NVFP4")
    with tempfile.TemporaryDirectory(prefix="flintc-demo-") as name:
        bundle = _compile(path, Path(name) / "bundle", tell)
        ablation = _ablate(path, tell)
        if not as_json:
            show_ablation(ablation)
        kernels = _interpret(path, bundle, max_tokens, tell)
    torch = api.load(path, backend="reference")
    greedy = _continue(torch, max_tokens + LONGER, tell)
    same = greedy.token_ids[: len(kernels.token_ids)] == kernels.token_ids
    errors = _compare(path, {"kernels": kernels, "torch": greedy}, tell) if same else {}
    sampled = _sample(torch, tell)
    generations = {"kernels": kernels, "torch": greedy, "sampled": sampled}
    data = {
        "checkpoint": str(path),
        "ablation": ablation.to_json(),
        **{name: asdict(generation) for name, generation in generations.items()},
        "logprob_errors": errors,
    }
    emit(as_json, data, lambda: None)
    if not same:
        raise VerificationError("the kernels chose other tokens than torch at the same rounding points")


def _from_here(path: Path) -> Path:
    """``path`` as one would type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _compile(checkpoint: Path, folder: Path, tell: Tell) -> Bundle:
    from flintc import api

    tell(f"\n1. flintc compile {SPEC} --for {checkpoint}: kernels for sm_90, with no GPU")
    with progress("compiling") as update:
        bundle = api.compile(SPEC, checkpoint=checkpoint, out=folder, progress=update)
    tell(f"   {len(bundle.plan.launches)} launches served by {len(bundle.plan.kernels)} kernels")
    return bundle


def _ablate(checkpoint: Path, tell: Tell) -> Ablation:
    from flintc import api
    from flintc.bench.ablation import ablate

    tell(f"\n2. flintc ablate {SPEC} --for {checkpoint}: what each pass saves\n")
    model, weights = api.model_of(SPEC, checkpoint=checkpoint)
    return ablate(api.run_passes(model, weights), context=model.dims["context"])


def _interpret(checkpoint: Path, bundle: Bundle, max_tokens: int, tell: Tell) -> Generation:
    from flintc import api

    options = f"--prompt {PROMPT} --temperature 0 --max-tokens {max_tokens}"
    tell(f"\n3. flintc generate {checkpoint} {options} --backend interpret: the kernels in Triton's interpreter")
    with stderr.status("generating") if stderr.is_terminal else nullcontext():
        model = api.load(checkpoint, bundle=bundle, backend="interpret")
        made = model.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
    _show(PROMPT, made, tell)
    return made


def _continue(model: Model, max_tokens: int, tell: Tell) -> Generation:
    tell(f"\n4. the same with --backend reference, torch at the same rounding points, and {LONGER} tokens more")
    made = model.generate(PROMPT, max_tokens=max_tokens, temperature=0.0)
    _show(PROMPT, made, tell)
    return made


def _compare(checkpoint: Path, made: Mapping[str, Generation], tell: Tell) -> dict[str, float]:
    """How far the log-probabilities of the first tokens, which all have in common, are from those in FP32."""
    from flintc import api

    exact = api.load(checkpoint, backend="reference", numerics="fp32")
    count = min(len(generation.token_ids) for generation in made.values())
    ids = next(iter(made.values())).token_ids[:count]
    logits = exact.forward([*exact.tokenizer.encode(PROMPT), *ids])[-count - 1 : -1, : exact.sampled_vocab]
    wanted = [row[token].item() for row, token in zip(logits.log_softmax(1), ids, strict=True)]
    errors = {
        name: max(abs(a - b) for a, b in zip(generation.logprobs, wanted, strict=False))
        for name, generation in made.items()
    }
    said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    tell(f"   the first {count} tokens are the same; their log-probabilities are off from FP32 by at most: {said}")
    return errors


def _sample(model: Model, tell: Tell) -> Generation:
    tell(f"\n5. {SAMPLED_TOKENS} tokens of another text by --backend reference, sampled with --seed {SEED}")
    made = model.generate(SAMPLED, max_tokens=SAMPLED_TOKENS, seed=SEED)
    _show(SAMPLED, made, tell)
    return made


def _show(prompt: str, made: Generation, tell: Tell) -> None:
    text = prompt + (made.text or "")
    tell("\n".join(f"   | {line}".rstrip() for line in text.split("\n")))
