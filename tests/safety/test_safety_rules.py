"""Each rule refuses what breaks it, and says where: the launch, the value, its memory, the other launch."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from graphs import baseline
from judge import SPECS
from mutants_of_memory import small_ring

from flintc.codegen.effects import effects_of
from flintc.codegen.planner import plan
from flintc.codegen.sampler import with_sampler
from flintc.errors import VerificationError
from flintc.ir.plan import Arg, Effect, Param, Path, Plan, Scratch
from flintc.ir.types import TensorType
from flintc.passes import PASSES, run_pipeline
from flintc.safety import RULES, check_plan, find_hazards


@cache
def sound() -> Plan:
    """A model of three layers after the whole pipeline."""
    return plan(run_pipeline(baseline(SPECS[0]), list(PASSES)).graph)


def with_paths(launch: str, edit: Callable[[Path], Path], waits: bool = True) -> Plan:
    """The sound plan with every path of one launch's kernel edited."""
    (planned,) = (x for x in sound().launches if x.name == launch)
    kernel = sound().kernels[planned.kernel]
    changed = replace(kernel, name="changed", paths=tuple(edit(p) for p in kernel.paths), waits=waits)
    launches = tuple(replace(x, kernel="changed") if x.name == launch else x for x in sound().launches)
    return replace(sound(), kernels={**sound().kernels, "changed": changed}, launches=launches)


def pathless(launch: str) -> Plan:
    """The sound plan with a kernel that does not say what it does."""
    name = next(x.kernel for x in sound().launches if x.name == launch)
    return replace(sound(), kernels={**sound().kernels, name: replace(sound().kernels[name], paths=())})


def with_arg(launch: str, param: str, arg: Arg) -> Plan:
    (planned,) = (x for x in sound().launches if x.name == launch)
    names = [p.name for p in sound().kernels[planned.kernel].params]
    args = tuple(arg if name == param else a for name, a in zip(names, planned.args, strict=True))
    launches = tuple(replace(x, args=args) if x.name == launch else x for x in sound().launches)
    return replace(sound(), launches=launches)


def without(*kinds: str) -> Callable[[Path], Path]:
    return lambda path: tuple(e for e in path if e.kind not in kinds)


def first(kind: str, param: str = "") -> Callable[[Path], Path]:
    """Moves an effect to the beginning."""

    def edit(path: Path) -> Path:
        moved = [e for e in path if (e.kind, e.param) == (kind, param)]
        return (*(replace(e, last=()) for e in moved), *(e for e in path if e not in moved))

    return edit


def changed(edit: Callable[[Effect], Effect], kind: str, param: str = "") -> Callable[[Path], Path]:
    return lambda path: tuple(edit(e) if e.kind == kind and param in ("", e.param) else e for e in path)


def placed(value: str, buffer: str) -> Plan:
    held, type = sound().buffers[buffer], sound().graph.values[value].type
    buffers = {**sound().buffers, buffer: replace(held, types=(*held.types, type))}
    return replace(sound(), buffers=buffers, placement={**sound().placement, value: buffer})


def where(value: str) -> str:
    return sound().placement[value]


def typed(value: str, type: TensorType) -> Plan:
    values = {**sound().graph.values, value: replace(sound().graph.values[value], type=type)}
    return replace(sound(), graph=replace(sound().graph, values=values))


def homeless() -> Plan:
    """An activation without a buffer."""
    return replace(sound(), placement={k: v for k, v in sound().placement.items() if k != "L0.act"})


def two_levels(edit: Callable[[Path], Path] = lambda p: p, counter: str = "L0.attention.parts") -> Plan:
    """The sound plan, but layer 0's partials merge in parts, and the last of those that merge one merges these."""
    (planned,) = (x for x in sound().launches if x.name == "L0.attention")
    kernel = sound().kernels[planned.kernel]
    paths = dict.fromkeys(edit(_merged_in_parts(p)) if any(e.kind == "arrive" for e in p) else p for p in kernel.paths)
    made = replace(kernel, name="parted", params=(*kernel.params, Param("parts_ptr", "*i32")), paths=tuple(paths))
    launch = replace(planned, kernel="parted", args=(*planned.args, Arg("scratch", counter)))
    scratch = {**sound().scratch, counter: Scratch(counter, TensorType("i32", ("B",)))}
    launches = tuple(launch if x.name == launch.name else x for x in sound().launches)
    return replace(sound(), kernels={**sound().kernels, "parted": made}, launches=launches, scratch=scratch)


def _merged_in_parts(path: Path) -> Path:
    before = path[: next(i for i, e in enumerate(path) if e.kind == "arrive")]
    part, row = ("parts_ptr",), ("parts_ptr", "rows_ptr")
    statistics = ("o_ptr", "m_ptr", "l_ptr")
    return (
        *before,
        Effect("arrive", "parts_ptr"),
        Effect("reset", "parts_ptr", (), part),
        *(Effect("read", p, part, part) for p in statistics),
        *(Effect("write", p, part, part) for p in statistics),
        Effect("arrive", "rows_ptr", part, part),
        Effect("reset", "rows_ptr", part, row),
        *(Effect("read", p, row, row) for p in statistics),
        Effect("write", "y_ptr", row, row),
    )


def never_left() -> Plan:
    """The sound plan, but of those who merge a long row nobody puts the counter back."""
    (planned,) = (x for x in sound().launches if x.name == "L0.attention")
    kernel = sound().kernels[planned.kernel]
    source = kernel.source.replace("leave_few(rows_ptr + row_head, few)\n", "pass\n")
    assert source != kernel.source
    paths = effects_of(source, kernel.name, kernel.params, kernel.constants)
    kernels = {**sound().kernels, kernel.name: replace(kernel, source=source, paths=paths)}
    return replace(sound(), kernels=kernels)


#: Who merges a row looks only at what its own part left.
ROWS_AS_PARTS = changed(lambda e: replace(e, last=e.last[:1]), "read", "m_ptr")
UNSURE = changed(lambda e: replace(e, sure=False), "wait")
UNGUARDED = changed(lambda e: replace(e, guards=()), "write", "cache_ptr")
ANY_EXPERT = changed(lambda e: replace(e, guards=()), "read", "weight_ptr")

CASES: list[tuple[str, str, Callable[[], Plan], str]] = [
    ("launches", "embed", lambda: replace(sound(), launches=sound().launches[1:]), "0 times in the plan"),
    ("launches", "L0.down", lambda: pathless("L0.down"), "does not state its effects"),
    ("launches", "", lambda: placed("L0.w.o", where("residual")), "given as weight, is placed in buffer0"),
    ("launches", "", lambda: placed("L1.cache.1", where("residual")), "given as cache, is placed in buffer0"),
    ("launches", "", homeless, "L0.act is passed to a launch but has no buffer"),
    ("operands", "L0.down", lambda: with_arg("L0.down", "x_ptr", Arg("value", "L0.h")), "never reads L0.act"),
    ("operands", "L0.down", lambda: with_arg("L0.down", "y_ptr", Arg("value", "L0.x")), "never writes L0.x.1"),
    ("attribute", "L0.down", lambda: with_paths("L0.down", lambda p: p, waits=False), "lacks the attribute"),
    ("attribute", "L0.down", lambda: with_paths("L0.down", without("wait")), "never waits"),
    ("wait-once", "L0.down", lambda: with_paths("L0.down", lambda p: (*p, Effect("wait"))), "waits 2 times"),
    ("wait-once", "L0.down", lambda: with_paths("L0.down", UNSURE), "in a loop or under a condition"),
    ("wait-once", "L1.expert_gate_up", lambda: with_paths("L1.expert_gate_up", lambda p: without("wait")(p) if
      len(p) == 2 else p), "waits 0 times"),
    ("store-above-wait", "L0.down", lambda: with_paths("L0.down", first("write", "y_ptr")), "stores to L0.x.1 in"),
    ("store-above-wait", "L0.qkv", lambda: with_paths("L0.qkv", first("arrive", "arrivals_ptr")), "L0.qkv.arrivals"),
    ("load-above-wait", "L0.down", lambda: with_paths("L0.down", first("read", "x_ptr")),
     "loads L0.act in buffer2 above its wait, while launch L0.gate_up may be writing there"),
    ("load-above-wait", "L0.add_norm", lambda: with_paths("L0.add_norm", first("read", "residual_ptr")),
     "while launch embed may be writing there"),
    ("load-above-wait", "L1.attention", lambda: with_paths("L1.attention", first("read", "cache_ptr")),
     "loads L1.cache.1 in L1.cache above its wait, while launch L1.qkv may be writing there"),
    ("load-above-wait", "L0.qkv", lambda: with_paths("embed", first("trigger")),
     "loads positions above its wait, while the caller or the step before may be writing there"),
    ("order", "L0.down", lambda: with_paths("L0.gate_up", without("wait")), "no wait in between holds it back"),
    ("content", "L0.add_norm", lambda: placed("L0.x", where("residual")), "which holds L0.x since launch L0.o_proj"),
    ("content", "", lambda: replace(sound(), graph=replace(sound().graph, outputs=("L0.h",))), "end with L0.h in"),
    ("inside-launch", "L0.down", lambda: placed("L0.x.1", where("L0.act")), "while another reads L0.act there"),
    ("inside-launch", "L1.route", lambda: with_paths("L1.route", changed(lambda e: replace(e, last=()), "read")),
     "one program writes L1.logits"),
    ("inside-launch", "L1.route", lambda: with_paths("L1.route", changed(lambda e: replace(e, last=()), "write")),
     "whether or not it arrived last at L1.route.arrivals and read L1.logits"),
    ("inside-launch", "L0.attention", lambda: two_levels(ROWS_AS_PARTS),
     "reads L0.a.m whether or not it arrived last at L0.attention.rows"),
    ("counter", "L1.route", lambda: with_paths("L1.route", without("reset")), "does not put counter"),
    ("counter", "L1.route", lambda: with_paths("L1.route", changed(lambda e: replace(e, guards=()), "reset")),
     "by others than its last arriver"),
    ("counter", "L1.route", lambda: with_arg("L1.route", "arrivals_ptr", Arg("value", "L1.chosen")), "is no counter"),
    ("counter", "L0.attention", lambda: two_levels(counter="L0.attention.rows"), "serves two groups"),
    ("counter", "L0.attention", never_left, "does not put counter L0.attention.rows back to zero"),
    ("padding", "L1.qkv", lambda: with_paths("L1.qkv", UNGUARDED), "writes L1.cache.1 for rows whatever"),
    ("padding", "L1.expert_gate_up", lambda: with_paths("L1.expert_gate_up", ANY_EXPERT),
     "reads L1.w.expert_gate_up for rows whatever their expert is"),
    ("ring", "L1.qkv", lambda: typed("block_table.w13", TensorType("i32", ("Q", 2))), "L1.cache has 3*Q pages"),
    ("capacity", "L0.gate_up", lambda: typed("L0.act", TensorType("bf16", ("B", 1 << 20))), "not laid out for"),
]  # fmt: skip


def test_the_sound_plan_is_sound() -> None:
    assert find_hazards(sound()) == []
    assert find_hazards(two_levels()) == []


@pytest.mark.parametrize(("rule", "launch", "make", "said"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_a_broken_rule_is_named(rule: str, launch: str, make: Callable[[], Plan], said: str) -> None:
    hazards = find_hazards(make())
    assert any(h.rule == rule and h.launch == launch and said in str(h) for h in hazards), [str(h) for h in hazards]


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, *_ in CASES} == set(RULES)


def test_the_page_says_what_a_refusal_says() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "dependent-launch.md").read_text(encoding="utf-8")
    _, table = page.split("| rule | says |\n|---|---|\n")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table.partition("\n\n")[0], re.M)
    assert dict(rows) == RULES


def test_a_ring_one_page_too_small() -> None:
    """A window of 13 and 8 rows need 20 positions: 2 pages of 8 are too few."""
    for seed in range(20):
        mutant = small_ring(sound(), Random(seed))
        assert mutant is not None
        message = str(next(h for h in find_hazards(mutant.plan) if h.rule == "ring"))
        assert "positions loses the oldest of a window of 13 while 8 rows are written" in message


def test_the_error_names_everything() -> None:
    with pytest.raises(VerificationError) as error:
        check_plan(with_paths("L0.down", first("read", "x_ptr")))
    assert error.value.message == (
        "the plan of short-flint has a hazard: launch L0.down: it loads L0.act in buffer2 above its wait, while launch "
        "L0.gate_up may be writing there (rule load-above-wait: nothing is loaded above the wait that a launch still "
        "running may write)"
    )


def sampled(edit: Callable[[Path], Path], waits: bool = False) -> list[str]:
    """Hazards of the sound plan with a sampler whose paths are edited."""
    made = with_sampler(sound())
    assert made.sampler is not None
    kernel = made.kernels[made.sampler.launches[0].kernel]
    changed = replace(kernel, paths=tuple(edit(path) for path in kernel.paths), waits=waits)
    return [str(h) for h in find_hazards(replace(made, kernels={**made.kernels, kernel.name: changed}))]


def test_the_sampler() -> None:
    """It follows the whole step, so it may touch what the step did; its counters and its memory keep the rules too."""
    assert sampled(lambda path: path) == []
    wait = Effect("wait")
    assert sampled(lambda path: (wait, *path), waits=True) == []
    assert any("lacks the attribute" in h for h in sampled(lambda path: (wait, *path)))
    early = sampled(lambda path: (Effect("read", "logits_ptr"), wait, *path), waits=True)
    assert any("loads logits in buffer7 above its wait, while launch head may be writing there" in h for h in early)
    assert any("does not put counter arrivals back to zero" in h for h in sampled(without("reset")))
    assert any("writes logits, which is not given to the next step" in h for h in sampled(
        lambda path: (*path, Effect("write", "logits_ptr"))
    ))  # fmt: skip
    shared = changed(lambda e: replace(e, last=()), "read", "best_ids_ptr")
    assert any("one program writes best_ids in best_ids while another reads" in h for h in sampled(shared))


def test_many_hazards_make_one_line() -> None:
    mutant = placed("L0.x", where("residual"))
    for name in list(mutant.placement)[:12]:
        mutant = replace(mutant, placement={**mutant.placement, name: "buffer0"})
    with pytest.raises(VerificationError) as error:
        check_plan(mutant)
    assert "\n" not in error.value.message and error.value.message.endswith("; ...")
