"""The static ablation and its report."""

import errno
import json
import re
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise

import pytest
from graphs import OTHER, baseline, pipeline
from rich.console import Console

from flintc.bench.ablation import ablate, ablation_table, added_note
from flintc.bench.report import load_published, render_report, waterfall, write_report
from flintc.errors import UsageError
from flintc.passes import PASSES, run_pipeline

NAMES = ["baseline", *PASSES]
JOINED = NAMES.index("dependent-launch")
FULL = {0, 1, *range(5, 46, 4), 48}


@pytest.fixture(scope="module")
def flint():
    return ablate(pipeline("flint", "nvfp4"))


def test_json_is_the_contract(flint):
    got = json.loads(json.dumps(flint.to_json()))
    assert (got["spec"], got["launches_head"]) == ("flint", 1)
    assert [s["pass"] for s in got["steps"]] == NAMES
    assert [s["launches_total"] for s in got["steps"]] == [1052, 954, 772, 723, 488, 345, 345, 490]
    for step in got["steps"]:
        assert set(step) >= {"pass", "launches_total", "launches_per_layer", "bytes", "ms", "kl_fp32", "kl_baseline"}
        assert (step["ms"], step["kl_fp32"], step["kl_baseline"]) == (None, None, None)
        assert isinstance(step["bytes"], int)
        assert list(step["launches_per_layer"]) == [str(n) for n in range(49)]
    before, joined, cut = (got["steps"][at]["launches_per_layer"] for at in (0, JOINED, -1))
    assert before == {"0": 13, "1": 14} | {str(n): 21 if n in FULL else 22 for n in range(2, 49)}
    assert set(joined.values()) == {7}
    assert cut == {str(n): 9 if n < 2 else 10 for n in range(49)}


def test_the_fewest_launches_and_who_adds_to_them(flint):
    """Joining comes to 345; what the last pass adds for time is said beside it."""
    assert (flint.fewest.name, flint.fewest.launches) == ("dependent-launch", 345)
    assert added_note(flint) == "split-arrivals adds 145 launches to save time: 490"
    uncut = ablate(run_pipeline(baseline("flint", "nvfp4"), list(PASSES), ["split-arrivals"]))
    assert (uncut.fewest, added_note(uncut)) == (uncut.steps[-1], "")
    alone = ablate(run_pipeline(baseline("flint", "nvfp4"), []))
    assert (alone.fewest.name, added_note(alone)) == ("baseline", "")


def test_a_change_is_signed_in_the_table(flint):
    lines = [line.split() for line in text_of(ablation_table(flint)).splitlines()]
    changes = {line[0]: line[-1] for line in reversed(lines) if line and line[0] in NAMES}
    assert [changes[name] for name in NAMES] == ["-", "-98", "-182", "-49", "-235", "-143", "-", "+145"]


def test_layers_and_the_launches_around_them_make_the_total(flint):
    for step in flint.steps:
        assert step.launches - sum(step.per_layer.values()) == (3 if step.name == "baseline" else 2)


def test_layer_kinds(flint):
    kinds = {kind.label: set(kind.layers) for kind in flint.kinds}
    assert kinds == {
        "dense, full, layer 0": {0},
        "dense, full, layer 1": {1},
        "MoE, sliding, 35 layers": set(range(49)) - FULL,
        "MoE, full, 12 layers": FULL - {0, 1},
    }
    for kind in flint.kinds:
        for step in flint.steps:
            assert len({step.per_layer[layer] for layer in kind.layers}) == 1


def test_estimate_is_bytes_at_the_bandwidth_and_a_latency_per_launch(flint):
    first, joined, last = flint.steps[0], flint.steps[JOINED], flint.steps[-1]
    assert first.estimate == pytest.approx(first.cost.bytes / 4.64e12 + 1052 * 1.5e-6)
    # The first launch of a chain triggers late, and counts as plain.
    assert joined.estimate == pytest.approx(joined.cost.bytes / 4.64e12 + 344 * 1.05e-6 + 1.5e-6)
    assert last.estimate == pytest.approx(last.cost.bytes / 4.64e12 + 489 * 1.05e-6 + 1.5e-6)
    twice = ablate(pipeline("flint", "nvfp4"), bandwidth=9.28e12)
    assert twice.steps[0].bytes_seconds == pytest.approx(first.bytes_seconds / 2)


def test_ops_merged_are_those_that_share_a_launch(flint):
    assert [s.merged for s in flint.steps[:2]] == [0, 2 * 98]
    for step, graph in zip(flint.steps, (s.graph for s in pipeline("flint", "nvfp4").steps), strict=True):
        alone = sum(len(x.ops) == 1 for x in graph.body)
        assert step.merged == 1052 - alone


def test_redundancy_names_the_launch_that_recomputes(flint):
    assert [s.redundant is None for s in flint.steps] == [True] * 4 + [False] * 4
    worst = flint.steps[-1].redundant
    assert worst.launch == "L2.route"
    assert worst.evaluations == {"L2.mlp_add": 64, "L2.mlp_norm": 64}


def test_more_context_only_moves_more_bytes():
    run = pipeline("flint", "nvfp4")
    short, long = ablate(run, context=1000), ablate(run, context=100_000)
    for a, b in zip(short.steps, long.steps, strict=True):
        assert (a.launches, a.merged) == (b.launches, b.merged)
        assert a.cost.bytes < b.cost.bytes


@pytest.mark.parametrize("wrong", [{"context": 0}, {"batch": -1}, {"bandwidth": 0.0}])
def test_figures_must_be_positive(wrong):
    with pytest.raises(UsageError, match="must be positive"):
        ablate(pipeline("tiny-flint"), **wrong)


def test_measurements_are_filled_in_beside_the_estimate(flint):
    got = flint.measured("baseline", seconds=0.0025, kl_fp32=1e-4)
    steps = got.to_json()["steps"]
    assert (steps[0]["ms"], steps[0]["kl_fp32"], steps[1]["ms"]) == (2.5, 1e-4, None)
    assert flint.steps[0].seconds is None


def test_a_shorter_pipeline():
    got = ablate(run_pipeline(baseline("tiny-flint"), list(PASSES), ["combine-gemv"]))
    assert [s.name for s in got.steps] == [n for n in NAMES if n != "combine-gemv"]


def text_of(renderable, width=80):
    console = Console(width=width, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize("measured", [False, True])
def test_table_fits_a_terminal_and_holds_every_count(flint, measured):
    shown = flint.measured("baseline", seconds=1.0) if measured else flint
    text = text_of(ablation_table(shown))
    for step in flint.steps:
        counts, costs = (line.split() for line in text.splitlines() if line.split()[:1] == [step.name])
        assert counts[1:6] == [*(str(step.per_layer[k.layers[0]]) for k in flint.kinds), f"{step.launches:,}"]
        assert f"{step.cost.bytes_read / 1e6:,.1f}" in costs and f"{step.estimate * 1e3:.3f}" in costs
    assert "computed, not measured" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.split().count("measured") == 1 + measured  # the note says it once


class Page(HTMLParser):
    """Collects tags, and every address that a browser would fetch."""

    VOID = ("meta", "img", "br", "rect", "line")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class Rects(HTMLParser):
    """Collects the rectangles of the page."""

    def __init__(self):
        super().__init__()
        self.rects = []

    def handle_starttag(self, tag, attrs):
        if tag == "rect":
            self.rects.append(dict(attrs))


def parse(html):
    page = Page()
    page.feed(html)
    assert page.open == []
    return page


@pytest.mark.parametrize(("spec", "steps"), [("flint", 8), ("tiny-flint", 8), (OTHER, 8)])
def test_report_is_one_file_that_fetches_nothing(spec, steps):
    run = pipeline(spec)
    html = render_report(ablate(run, context=200), run)
    page = parse(html)
    assert all(a.startswith("data:image/svg+xml;base64,") for a in page.addresses)
    assert not re.search(r"@import|url\(|<script|<link", html)
    assert page.tags.count("img") == 2
    assert page.tags.count("rect") >= steps


def test_report_sets_the_published_steps_beside_ours(flint):
    html = render_report(flint, pipeline("flint", "nvfp4"))
    text = re.sub(r"\s+", " ", re.sub(r"<style.*?</style>|<[^>]+>", " ", html, flags=re.S))
    text = text.translate({ord("\N{EN DASH}"): "-", ord("\N{MINUS SIGN}"): "-"})
    assert "1,096 → 346 there, 1,052 → 345 here" in text
    added = "split-arrivals adds 145 launches to save time: 490."
    assert f"One decode step goes from 1,052 launches to 345 . {added}" in text
    assert f"Ours are those of the step with the fewest launches: {added}" in text
    # 22 launches for each of 49 layers leave 18 elsewhere; 7 leave 3.
    assert "they make 1,078 and 343, which leaves 18 and 3 launches outside the layers" in text
    assert "MoE, full, 12 layers 12 21 12" in text
    assert "in all 49 1,049 29" in text
    assert "with it ours would be 1,053 and 346" in text
    assert "small-batch dense GEMV on the packed NVFP4 weights -25 % - -" in text
    assert "- - combine-gemv -143" in text
    assert "- - split-arrivals +145 launches added to save time" in text
    assert "q/k norm, RoPE and cache write fused -8 % norm-rope-cache -182" in text


def test_a_model_without_published_figures_is_compared_with_none():
    run = pipeline("tiny-flint")
    assert "published" not in render_report(ablate(run, context=200), run)


def test_published_steps_name_passes_that_exist():
    for published in load_published().values():
        assert {step["pass"] for step in published["steps"]} - {None} <= set(PASSES)


def test_waterfall_bars_stand_on_what_the_step_before_left(flint):
    bars = waterfall(flint)
    for before, bar in pairwise(bars):
        assert bar.top - bar.drop == pytest.approx(before.top)
        assert bar.top + bar.height == pytest.approx(before.top + before.height)
        assert bar.x > before.x
    assert bars[0].height / bars[JOINED].height == pytest.approx(1052 / 345)
    assert bars[0].height / bars[-1].height == pytest.approx(1052 / 490)
    assert [bar.fewer for bar in bars] == [0, 98, 182, 49, 235, 143, 0, -145]


def test_what_a_step_adds_is_drawn_within_its_bar(flint):
    """What a step takes away stands above its bar; what it adds is the top of the bar, in another colour."""
    page = Rects()
    page.feed(render_report(flint, pipeline("flint", "nvfp4")))
    assert all(float(r["height"]) > 0 and float(r["y"]) >= 0 for r in page.rects)
    (rise,) = (r for r in page.rects if r["class"] == "rise")
    drops = [r for r in page.rects if r["class"] == "drop"]
    bars = [r for r in page.rects if r["class"] == "bar"]
    assert (len(bars), len(drops)) == (8, 5)
    assert (rise["x"], rise["y"]) == (bars[-1]["x"], bars[-1]["y"])
    assert float(rise["height"]) == pytest.approx(float(bars[0]["height"]) * 145 / 1052, abs=0.06)
    for drop in drops:
        (bar,) = (b for b in bars if b["x"] == drop["x"])
        assert float(drop["y"]) + float(drop["height"]) == pytest.approx(float(bar["y"]), abs=0.11)


def test_report_replaces_the_file_whole_or_leaves_it(tmp_path, flint, monkeypatch):
    run = pipeline("flint", "nvfp4")
    path = tmp_path / "report.html"
    path.write_text("before")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match=r"disk full: .*/report\.html"):
        write_report(path, flint, run)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_report(path, flint, run)
    assert path.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [path]
