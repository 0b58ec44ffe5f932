"""Each rule refuses what breaks it, and says where: the launch, the value, its memory, the other launch."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from mutants_of_memory import small_ring
from sound_plans import SPECS, the_whole_of

from flintc.codegen.effects import effects_of
from flintc.codegen.sampler import with_sampler
from flintc.errors import VerificationError
from flintc.ir.plan import Arg, Effect, Param, Path, Plan, PlannedLaunch, Scratch
from flintc.ir.types import TensorType
from flintc.safety import RULES, check_plan, find_hazards

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "dependent-launch.md").read_text(encoding="utf-8")

#: Chained plans: with arrivals, and cut where their last arrivers would go on.
KINDS = ("joined", "cut")


def sound(kind: str) -> Plan:
    """A model of three layers after all passes that this kind of plan has."""
    return the_whole_of(SPECS[0], kind)


def planned(of: Plan, launch: str) -> PlannedLaunch:
    (found,) = (x for x in of.launches if x.name == launch)
    return found


def with_launch(of: Plan, launch: PlannedLaunch) -> Plan:
    return replace(of, launches=tuple(launch if x.name == launch.name else x for x in of.launches))


def with_paths(of: Plan, launch: str, edit: Callable[[Path], Path], waits: bool = True) -> Plan:
    """``of`` with every path of one launch's kernel edited."""
    kernel = of.kernels[planned(of, launch).kernel]
    name = f"changed.{launch}"
    changed = replace(kernel, name=name, paths=tuple(edit(p) for p in kernel.paths), waits=waits)
    made = replace(of, kernels={**of.kernels, name: changed})
    return with_launch(made, replace(planned(of, launch), kernel=name))


def pathless(of: Plan, launch: str) -> Plan:
    """``of`` with a kernel that does not say what it does."""
    name = planned(of, launch).kernel
    return replace(of, kernels={**of.kernels, name: replace(of.kernels[name], paths=())})


def with_arg(of: Plan, launch: str, param: str, arg: Arg) -> Plan:
    names = [p.name for p in of.kernels[planned(of, launch).kernel].params]
    args = tuple(arg if name == param else a for name, a in zip(names, planned(of, launch).args, strict=True))
    return with_launch(of, replace(planned(of, launch), args=args))


def dropped(of: Plan, launch: str) -> Plan:
    return replace(of, launches=tuple(x for x in of.launches if x.name != launch))


def without(*kinds: str) -> Callable[[Path], Path]:
    return lambda path: tuple(e for e in path if e.kind not in kinds)


def first(kind: str, param: str = "") -> Callable[[Path], Path]:
    """Moves an effect to the beginning."""

    def edit(path: Path) -> Path:
        moved = [e for e in path if (e.kind, e.param) == (kind, param)]
        return (*(replace(e, last=()) for e in moved), *(e for e in path if e not in moved))

    return edit


def early(param: str, *told: str) -> Callable[[Path], Path]:
    """Another read of ``param`` at the beginning, said to leave out what the step writes as ``told`` tell it."""

    def edit(path: Path) -> Path:
        read = next((e for e in path if (e.kind, e.param) == ("read", param)), None)
        return path if read is None else (replace(read, last=(), earlier=told), *path)

    return edit


def changed(edit: Callable[[Effect], Effect], kind: str, param: str = "") -> Callable[[Path], Path]:
    return lambda path: tuple(edit(e) if e.kind == kind and param in ("", e.param) else e for e in path)


def on_one_path(number: int, edit: Callable[[Path], Path]) -> Callable[[Plan, str], Plan]:
    """Edits one path of a launch's kernel, and leaves the others."""

    def make(of: Plan, launch: str) -> Plan:
        path = of.kernels[planned(of, launch).kernel].paths[number]
        return with_paths(of, launch, lambda p: edit(p) if p == path else p)

    return make


def placed(of: Plan, value: str, beside: str) -> Plan:
    """``of`` with ``value`` in the buffer of another."""
    buffer = of.placement[beside]
    held, type = of.buffers[buffer], of.graph.values[value].type
    buffers = {**of.buffers, buffer: replace(held, types=(*held.types, type))}
    return replace(of, buffers=buffers, placement={**of.placement, value: buffer})


def typed(of: Plan, value: str, type: TensorType) -> Plan:
    values = {**of.graph.values, value: replace(of.graph.values[value], type=type)}
    return replace(of, graph=replace(of.graph, values=values))


def homeless(of: Plan, value: str) -> Plan:
    """An activation without a buffer."""
    return replace(of, placement={k: v for k, v in of.placement.items() if k != value})


def counting(of: Plan, launch: str, counter: str, edit: Callable[[Path], Path]) -> Plan:
    """``of``, but one launch is given a counter of its own as well, and counts at it."""
    kernel, args = of.kernels[planned(of, launch).kernel], planned(of, launch).args
    made = replace(
        kernel, name="counting", params=(*kernel.params, Param("parts_ptr", "*i32")),
        paths=tuple(dict.fromkeys(edit(p) for p in kernel.paths)),
    )  # fmt: skip
    changed = replace(planned(of, launch), kernel="counting", args=(*args, Arg("scratch", counter)))
    scratch = {**of.scratch, counter: Scratch(counter, TensorType("i32", ("B",)))}
    return with_launch(replace(of, kernels={**of.kernels, "counting": made}, scratch=scratch), changed)


def two_levels(of: Plan, edit: Callable[[Path], Path] = lambda p: p, counter: str = "L0.attention.parts") -> Plan:
    """The plan, but layer 0's partials merge in parts, and the last of those that merge one merges these."""

    def merged(path: Path) -> Path:
        return edit(_merged_in_parts(path)) if any(e.kind == "arrive" for e in path) else path

    return counting(of, "L0.attention", counter, merged)


def _merged_in_parts(path: Path) -> Path:
    at = next(i for i, e in enumerate(path) if e.kind == "arrive")
    part, row = ("parts_ptr",), ("parts_ptr", "rows_ptr")
    statistics = ("o_ptr", "m_ptr", "l_ptr")
    return (
        *path[:at],
        Effect("arrive", "parts_ptr"),
        Effect("reset", "parts_ptr", (), part),
        *(Effect("read", p, part, part) for p in statistics),
        *(Effect("write", p, part, part) for p in statistics),
        Effect("arrive", "rows_ptr", part, part),
        Effect("reset", "rows_ptr", part, row),
        *(Effect("read", p, row, row) for p in statistics),
        # What the last arriver reads that nobody wrote, the sinks, it reads as before.
        *(replace(e, last=row) for e in path[at:] if e.kind == "read" and e.param not in statistics),
        Effect("write", "y_ptr", row, row),
    )


def never_put_back(of: Plan, launch: str) -> Plan:
    """``of``, but the source of one kernel lets the last arriver leave its counter as it is."""
    kernel = of.kernels[planned(of, launch).kernel]
    source = kernel.source.replace("tl.store(counter_ptr, 0)\n", "pass\n")
    assert source != kernel.source
    paths = effects_of(source, kernel.name, kernel.params, kernel.constants)
    return replace(of, kernels={**of.kernels, kernel.name: replace(kernel, source=source, paths=paths)})


def arriving(path: Path) -> Path:
    """Arrives at a counter that nobody puts back."""
    return (*path, Effect("arrive", "parts_ptr"))


#: Who merges a row looks only at what its own part left.
ROWS_AS_PARTS = changed(lambda e: replace(e, last=e.last[:1]), "read", "m_ptr")
UNSURE = changed(lambda e: replace(e, sure=False), "wait")
UNGUARDED = changed(lambda e: replace(e, guards=()), "write", "cache_ptr")
UNGUARDED_TABLE = changed(lambda e: replace(e, guards=()), "read", "block_table_ptr")
UNGUARDED_PAGES = changed(lambda e: replace(e, guards=()), "read", "cache_ptr")
ANY_EXPERT = changed(lambda e: replace(e, guards=()), "read", "weight_ptr")

#: What tells which positions a step writes.
ROWS = ("positions_ptr", "seqs_ptr")

#: Rule, launch, what breaks the plan, and what the refusal says; @ before a value stands for its buffer.
Case = tuple[str, str, Callable[[Plan], Plan], str]

#: What breaks a plan of either kind.
EITHER: list[Case] = [
    ("launches", "embed", lambda p: dropped(p, "embed"), "0 times in the plan"),
    ("launches", "L0.down", lambda p: pathless(p, "L0.down"), "does not state its effects"),
    ("launches", "", lambda p: placed(p, "L0.w.o", "residual"), "given as weight, is placed in @residual"),
    ("launches", "", lambda p: placed(p, "L1.cache.1", "residual"), "given as cache, is placed in @residual"),
    ("launches", "", lambda p: homeless(p, "L0.act"), "L0.act is passed to a launch but has no buffer"),
    ("operands", "L0.down", lambda p: with_arg(p, "L0.down", "x_ptr", Arg("value", "L0.h")), "never reads L0.act"),
    ("operands", "L0.down", lambda p: with_arg(p, "L0.down", "y_ptr", Arg("value", "L0.x")), "never writes L0.x.1"),
    ("attribute", "L0.down", lambda p: with_paths(p, "L0.down", lambda x: x, waits=False), "lacks the attribute"),
    ("attribute", "L0.down", lambda p: with_paths(p, "L0.down", without("wait")), "never waits"),
    ("wait-once", "L0.down", lambda p: with_paths(p, "L0.down", lambda x: (*x, Effect("wait"))), "waits 2 times"),
    ("wait-once", "L0.down", lambda p: with_paths(p, "L0.down", UNSURE), "in a loop or under a condition"),
    ("wait-once", "L1.expert_gate_up", lambda p: with_paths(p, "L1.expert_gate_up", lambda x: without("wait")(x) if
      len(x) == 2 else x), "waits 0 times"),
    ("store-above-wait", "L0.down", lambda p: with_paths(p, "L0.down", first("write", "y_ptr")), "stores to L0.x.1 in"),
    ("load-above-wait", "L0.down", lambda p: with_paths(p, "L0.down", first("read", "x_ptr")),
     "loads L0.act in @L0.act above its wait, while launch L0.gate_up may be writing there"),
    ("load-above-wait", "L0.down", lambda p: with_paths(p, "L0.down", early("x_ptr", "x_ptr", "y_ptr")),
     "loads L0.act in @L0.act above its wait, while launch L0.gate_up may be writing there"),
    ("load-above-wait", "L1.attention", lambda p: with_paths(p, "L1.attention", early("cache_ptr", *reversed(ROWS))),
     "loads L1.cache.1 in L1.cache above its wait, while launch L1."),
    ("load-above-wait", "L1.attention", lambda p: with_paths(with_paths(p, "embed", first("trigger")),
     "L1.attention", early("cache_ptr", *ROWS)),
     "loads L1.cache.1 in L1.cache above its wait, while the caller or the step before may be writing there"),
    ("operands", "L1.attention", lambda p: with_paths(p, "L1.attention",
     changed(lambda e: replace(e, earlier=ROWS), "read", "cache_ptr")), "never reads L1.cache.1"),
    ("load-above-wait", "L0.add_norm", lambda p: with_paths(p, "L0.add_norm", first("read", "residual_ptr")),
     "while launch embed may be writing there"),
    ("order", "L0.down", lambda p: with_paths(p, "L0.gate_up", without("wait")), "no wait in between holds it back"),
    ("content", "L0.add_norm", lambda p: placed(p, "L0.x", "residual"), "which holds L0.x since launch L0.o_proj"),
    ("content", "", lambda p: replace(p, graph=replace(p.graph, outputs=("L0.h",))), "end with L0.h in"),
    ("inside-launch", "L0.down", lambda p: placed(p, "L0.x.1", "L0.act"), "while another reads L0.act there"),
    ("padding", "L1.expert_gate_up", lambda p: with_paths(p, "L1.expert_gate_up", ANY_EXPERT),
     "reads L1.w.expert_gate_up for rows whatever their expert is"),
    ("padding", "L0.attention", lambda p: with_paths(p, "L0.attention", UNGUARDED_PAGES),
     "reads L0.cache.1 for rows whatever their sequence slot is"),
    ("capacity", "L0.gate_up", lambda p: typed(p, "L0.act", TensorType("bf16", ("B", 1 << 20))), "not laid out for"),
]  # fmt: skip

#: What breaks a plan in which last arrivers go on.
JOINED: list[Case] = [
    ("store-above-wait", "L0.qkv", lambda p: with_paths(p, "L0.qkv", first("arrive", "arrivals_ptr")),
     "L0.qkv.arrivals"),
    ("load-above-wait", "L1.attention", lambda p: with_paths(p, "L1.attention", first("read", "cache_ptr")),
     "loads L1.cache.1 in L1.cache above its wait, while launch L1.qkv may be writing there"),
    ("load-above-wait", "L0.qkv", lambda p: with_paths(p, "embed", first("trigger")),
     "loads positions above its wait, while the caller or the step before may be writing there"),
    ("inside-launch", "L1.route", lambda p: with_paths(p, "L1.route", changed(lambda e: replace(e, last=()), "read")),
     "one program writes L1.logits"),
    ("inside-launch", "L1.route", lambda p: with_paths(p, "L1.route", changed(lambda e: replace(e, last=()), "write")),
     "whether or not it arrived last at L1.route.arrivals and read L1.logits"),
    ("inside-launch", "L0.attention", lambda p: two_levels(p, ROWS_AS_PARTS),
     "reads L0.a.m whether or not it arrived last at L0.attention.rows"),
    ("counter", "L1.route", lambda p: with_paths(p, "L1.route", without("reset")), "does not put counter"),
    ("counter", "L1.route", lambda p: with_paths(p, "L1.route", changed(lambda e: replace(e, guards=()), "reset")),
     "by others than its last arriver"),
    ("counter", "L1.route", lambda p: with_arg(p, "L1.route", "arrivals_ptr", Arg("value", "L1.chosen")),
     "is no counter"),
    ("counter", "L0.attention", lambda p: two_levels(p, counter="L0.attention.rows"), "serves two groups"),
    ("counter", "L0.attention", lambda p: never_put_back(p, "L0.attention"),
     "does not put counter L0.attention.rows back to zero"),
    ("padding", "L1.qkv", lambda p: with_paths(p, "L1.qkv", UNGUARDED), "writes L1.cache.1 for rows whatever"),
    ("ring", "L1.qkv", lambda p: typed(p, "block_table.w13", TensorType("i32", ("Q", 2))), "L1.cache has 3*Q pages"),
]  # fmt: skip

#: What breaks a cut plan, at the launches that it has in place of last arrivers.
CUT: list[Case] = [
    ("launches", "L1.topk", lambda p: dropped(p, "L1.topk"), "0 times in the plan"),
    ("launches", "L1.heads", lambda p: pathless(p, "L1.heads"), "does not state its effects"),
    ("operands", "L0.attention_merge", lambda p: with_arg(p, "L0.attention_merge", "m_ptr", Arg("value", "L0.a.l")),
     "never reads L0.a.m"),
    ("operands", "L0.heads", lambda p: with_arg(p, "L0.heads", "cache_ptr", Arg("value", "L2.cache.1")),
     "never writes L0.cache.1"),
    ("attribute", "L1.topk", lambda p: with_paths(p, "L1.topk", without("wait")), "never waits"),
    ("attribute", "L1.heads", lambda p: with_paths(p, "L1.heads", lambda x: x, waits=False), "lacks the attribute"),
    ("wait-once", "L0.attention", lambda p: on_one_path(0, without("wait"))(p, "L0.attention"), "waits 0 times"),
    ("wait-once", "L0.attention_merge", lambda p: with_paths(p, "L0.attention_merge", UNSURE), "under a condition"),
    ("store-above-wait", "L1.heads", lambda p: with_paths(p, "L1.heads", first("write", "cache_ptr")),
     "stores to L1.cache.1 in L1.cache above"),
    ("store-above-wait", "L1.topk", lambda p: with_paths(p, "L1.topk", first("write", "ids_ptr")),
     "stores to L1.chosen in @L1.chosen above"),
    ("load-above-wait", "L0.heads", lambda p: with_paths(p, "L0.heads", first("read", "qkv_ptr")),
     "loads L0.qkv in @L0.qkv above its wait, while launch L0.qkv may be writing there"),
    ("load-above-wait", "L1.attention", lambda p: with_paths(p, "L1.attention", first("read", "cache_ptr")),
     "loads L1.cache.1 in L1.cache above its wait, while launch L1.heads may be writing there"),
    ("load-above-wait", "L0.attention_merge", lambda p: with_paths(p, "L0.attention_merge", first("read", "o_ptr")),
     "loads L0.a.o in @L0.a.o above its wait, while launch L0.attention may be writing there"),
    ("load-above-wait", "L1.topk", lambda p: with_paths(p, "L1.topk", first("read", "logits_ptr")),
     "loads L1.logits in @L1.logits above its wait, while launch L1.route may be writing there"),
    ("load-above-wait", "L0.heads", lambda p: with_paths(p, "embed", first("trigger")),
     "loads positions above its wait, while the caller or the step before may be writing there"),
    ("order", "L1.attention", lambda p: with_paths(p, "L1.heads", without("wait")), "no wait in between"),
    ("content", "L0.attention_merge", lambda p: placed(p, "L0.a.m", "L0.a.l"), "reads L0.a.m in @L0.a.l, which holds"),
    ("inside-launch", "L0.heads", lambda p: placed(p, "L0.q", "L0.qkv"), "while another reads L0.qkv there"),
    ("inside-launch", "L0.attention_merge", lambda p: placed(p, "L0.a", "L0.a.o"), "while another reads L0.a.o there"),
    ("inside-launch", "L1.topk", lambda p: placed(p, "L1.mix", "L1.logits"), "while another reads L1.logits there"),
    ("counter", "L1.topk", lambda p: counting(p, "L1.topk", "L1.topk.parts", arriving),
     "does not put counter L1.topk.parts back to zero"),
    ("padding", "L1.heads", lambda p: with_paths(p, "L1.heads", UNGUARDED), "writes L1.cache.1 for rows whatever"),
    ("padding", "L1.heads", lambda p: with_paths(p, "L1.heads", UNGUARDED_TABLE),
     "reads block_table.w13 for rows whatever"),
    ("ring", "L1.heads", lambda p: typed(p, "block_table.w13", TensorType("i32", ("Q", 2))), "L1.cache has 3*Q pages"),
    ("capacity", "L0.attention", lambda p: typed(p, "L0.a.o", TensorType("f32", ("B", 1 << 20))), "not laid out for"),
]  # fmt: skip

CASES = [
    *(("joined", *case) for case in (*EITHER, *JOINED)),
    *(("cut", *case) for case in (*EITHER, *CUT)),
]  # fmt: skip


def said_of(of: Plan, said: str) -> str:
    """``said`` with buffers in place of the values that they stand for."""
    return re.sub(r"@([\w.]*\w)", lambda m: of.placement[m[1]], said)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sound_plan_is_sound(kind: str) -> None:
    assert find_hazards(sound(kind)) == []


def test_a_sound_plan_whose_last_arrivers_arrive_again() -> None:
    assert find_hazards(two_levels(sound("joined"))) == []


@pytest.mark.parametrize(
    ("kind", "rule", "launch", "make", "said"), CASES, ids=[f"{i}-{c[0]}-{c[1]}" for i, c in enumerate(CASES)]
)
def test_a_broken_rule_is_named(kind: str, rule: str, launch: str, make: Callable[[Plan], Plan], said: str) -> None:
    hazards, expected = find_hazards(make(sound(kind))), said_of(sound(kind), said)
    assert any(h.rule == rule and h.launch == launch and expected in str(h) for h in hazards), [str(h) for h in hazards]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_has_a_case(kind: str) -> None:
    assert {rule for of, rule, *_ in CASES if of == kind} == set(RULES)


def test_the_page_says_what_a_refusal_says() -> None:
    _, table = PAGE.split("| rule | says |\n|---|---|\n")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table.partition("\n\n")[0], re.M)
    assert dict(rows) == RULES


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_one_page_too_small(kind: str) -> None:
    """A window of 13 and 8 rows need 20 positions: 2 pages of 8 are too few."""
    for seed in range(20):
        mutant = small_ring(sound(kind), Random(seed))
        assert mutant is not None
        message = str(next(h for h in find_hazards(mutant.plan) if h.rule == "ring"))
        assert "positions loses the oldest of a window of 13 while 8 rows are written" in message


@pytest.mark.parametrize("kind", KINDS)
def test_what_earlier_steps_wrote_of_a_cache_may_be_read_early(kind: str) -> None:
    """All that is left out depends on the rows' positions and sequences: those that the step's own writes go by."""
    for launch in ("L0.attention", "L1.attention"):
        check_plan(with_paths(sound(kind), launch, early("cache_ptr", *ROWS)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_everything(kind: str) -> None:
    with pytest.raises(VerificationError) as error:
        check_plan(with_paths(sound(kind), "L0.down", first("read", "x_ptr")))
    assert error.value.message == (
        "the plan of short-flint has a hazard: launch L0.down: it loads L0.act in "
        f"{sound(kind).placement['L0.act']} above its wait, while launch L0.gate_up may be writing there "
        "(rule load-above-wait: nothing is loaded above the wait that a launch still running may write)"
    )
    # The page shows it of the plan that the whole pipeline makes.
    assert kind != "cut" or error.value.message.partition("hazard: ")[2] in " ".join(PAGE.split())


def sampled(kind: str, edit: Callable[[Path], Path], waits: bool = False) -> list[str]:
    """Hazards of the sound plan with a sampler whose paths are edited."""
    made = with_sampler(sound(kind))
    assert made.sampler is not None
    kernel = made.kernels[made.sampler.launches[0].kernel]
    changed = replace(kernel, paths=tuple(edit(path) for path in kernel.paths), waits=waits)
    return [str(h) for h in find_hazards(replace(made, kernels={**made.kernels, kernel.name: changed}))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler(kind: str) -> None:
    """It follows the whole step, so it may touch what the step did; its counters and its memory keep the rules too."""
    assert sampled(kind, lambda path: path) == []
    wait = Effect("wait")
    assert sampled(kind, lambda path: (wait, *path), waits=True) == []
    assert any("lacks the attribute" in h for h in sampled(kind, lambda path: (wait, *path)))
    early = sampled(kind, lambda path: (Effect("read", "logits_ptr"), wait, *path), waits=True)
    said = said_of(sound(kind), "loads logits in @logits above its wait, while launch head may be writing there")
    assert any(said in h for h in early)
    assert any("does not put counter arrivals back to zero" in h for h in sampled(kind, without("reset")))
    assert any("writes logits, which is not given to the next step" in h for h in sampled(
        kind, lambda path: (*path, Effect("write", "logits_ptr"))
    ))  # fmt: skip
    shared = changed(lambda e: replace(e, last=()), "read", "best_ids_ptr")
    assert any("one program writes best_ids in best_ids while another reads" in h for h in sampled(kind, shared))


@pytest.mark.parametrize("kind", KINDS)
def test_many_hazards_make_one_line(kind: str) -> None:
    mutant = sound(kind)
    for name in ("L0.x", *list(mutant.placement)[:12]):
        mutant = replace(mutant, placement={**mutant.placement, name: sound(kind).placement["residual"]})
    with pytest.raises(VerificationError) as error:
        check_plan(mutant)
    assert "\n" not in error.value.message and error.value.message.endswith("; ...")
