"""Text, DOT and SVG of graphs."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest
from graphs import OTHER, Sketch, baseline, pipeline

from flintc.errors import UsageError
from flintc.ir.dot import to_dot
from flintc.ir.graph import Crossing
from flintc.ir.printer import layer_ranges, like_layers, to_text
from flintc.ir.svg import to_svg

SPECS = ["flint", "tiny-flint", OTHER]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_small_graph_to_the_letter():
    s = Sketch()
    s.given("x", "bf16", "B", 64)
    s.given("r", "bf16", "B", 64)
    s.weight("w.norm", "f32", 64)
    s.weight("w.router", "f32", 32, 64)
    s.op("add", "add", ["x", "r"], "sum residual")
    s.op("norm", "norm", ["sum", "w.norm"], "h", eps=1e-6)
    s.op("score", "router", ["h", "w.router"], "logits")
    s.op("twice", "sum", ["h", "h"], "y")
    crossings = (Crossing("sum", "local"), Crossing("h", "recompute"))
    graph = s.fused(["logits", "residual", "y"], "route", "add norm score", *crossings, tile=4)
    assert to_text(graph) == (
        "graph sketch: 2 launches, 4 ops\n"
        "  inputs  x bf16[B, 64], r bf16[B, 64]\n"
        "  makes   logits f32[B, 32], residual bf16[B, 64], y bf16[B, 64]\n"
        "\n"
        "before the layers: 2 launches\n"
        "  route  4 rows a program\n"
        "   │ sum f32[B, 64], residual bf16[B, 64] = add(x=x, residual=r)\n"
        "   │     ~ sum: local\n"
        "   │ h bf16[B, 64] = norm(x=sum, weight=w.norm f32[64])  eps=1e-06\n"
        "   │     ~ h: recompute x8, and written\n"
        "   │ logits f32[B, 32] = router(x=h, weight=w.router f32[32, 64])\n"
        "  twice  [sum]\n"
        "     y bf16[B, 64] = sum(a=b=h)\n"
    )


@pytest.mark.parametrize(
    ("weights", "total", "dense", "moe"),
    # Packed weights are little enough for their products to be cut from the heads; top-k and the merge always are.
    [("bf16", 441, 8, 9), ("nvfp4", 490, 9, 10)],
)
def test_flint_folds_its_like_layers(weights, total, dense, moe):
    text = to_text(pipeline("flint", weights).graph)
    headings = [line for line in text.splitlines() if line.startswith("layer ")]
    sliding = "3-4, 6-8, 10-12, 14-16, 18-20, 22-24, 26-28, 30-32, 34-36, 38-40, 42-44, 46-47"
    assert headings == [
        f"layer 0: {dense} launches",
        f"layer 1: {dense} launches",
        f"layer 2 (like it: {sliding}): {moe} launches",
        f"layer 5 (like it: 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48): {moe} launches",
    ]
    assert text.startswith(f"graph flint: {total} launches and 1 launch of the head, 1,053 ops\n")
    assert len(text.splitlines()) < 250


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", [0, -2, -1])
def test_layers_are_like_where_their_ops_are(spec, step):
    """Against a comparison of the ops themselves: kinds, attributes and types, with no text in between."""
    graph = pipeline(spec).steps[step].graph

    def structure(layer):
        return [
            (x.role, [(graph.ops[o].kind, graph.ops[o].attrs, [graph.values[v].type for v in graph.ops[o].inputs])
                      for o in x.ops])
            for x in graph.layer_launches(layer)
        ]  # fmt: skip

    groups = like_layers(graph)
    assert sorted(n for group in groups for n in group) == list(graph.layers())
    for group in groups:
        assert all(structure(n) == structure(group[0]) for n in group)
    for a, b in combinations(groups, 2):
        assert structure(a[0]) != structure(b[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", [-2, -1])
def test_every_op_of_a_layer_is_printed_once(spec, step):
    graph = pipeline(spec).steps[step].graph
    for layer in graph.layers():
        text = to_text(graph, layer)
        ops = [o for x in graph.layer_launches(layer) for o in x.ops]
        assert len(re.findall(r" (\w+)\((?=\w+=)", text)) == len(ops)
        assert f"L{layer}." not in text


@pytest.mark.parametrize("show", [to_text, to_svg])
def test_a_layer_that_is_not_there(show):
    with pytest.raises(UsageError) as error:
        show(baseline("tiny-flint"), 6)
    assert str(error.value) == "tiny-flint has no layer 6 (it has layers 0-5)"


def test_layer_ranges():
    assert layer_ranges([7, 1, 2, 3, 9, 8]) == "1-3, 7-9"
    assert layer_ranges([4]) == "4"
    assert layer_ranges([]) == ""


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", [-2, -1])
def test_dot_has_every_launch_and_every_edge(spec, step):
    graph = pipeline(spec).steps[step].graph
    dot = to_dot(graph)
    nodes = re.findall(r'^ +"([^"]+)" \[label', dot, re.M)
    assert sorted(nodes) == sorted(x.name for x in graph.launches)
    edges = re.findall(r'^ +"([^"]+)" -> "([^"]+)" ', dot, re.M)
    assert set(edges) == set(graph.launch_graph.edges)
    assert dot.count("{") == dot.count("}") == 1 + len(list(graph.layers()))


def boxes(svg, kind):
    root = ET.fromstring(svg)
    found = [r for r in root.iter(f"{SVG}rect") if r.get("class") == kind]
    return [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in found], root


def expected_arrows(graph, layer):
    """Pairs of launches of the layer, values that each reads from before it, values that leave it."""
    ops = {o for x in graph.layer_launches(layer) for o in x.ops}
    own = {x.name for x in graph.layer_launches(layer)}
    inner = [e for e in graph.launch_graph.edges if own.issuperset(e)]
    made = {v for o in graph.ops for v in graph.ops[o].outputs}
    ours = {v for o in ops for v in graph.ops[o].outputs}
    entering = {(v, graph.launch_of[o].name) for o in ops for v in graph.ops[o].inputs if v in made - ours}
    leaving = {v for o in set(graph.ops) - ops for v in graph.ops[o].inputs if v in ours}
    return len(inner) + len(entering) + len(leaving)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", [0, 3, -2, -1])
def test_svg_of_every_layer(spec, step):
    """One box a launch, none over another, all inside the drawing, one arrow a pair; no link to anything outside."""
    graph = pipeline(spec).steps[step].graph
    for layer in range(6) if spec != OTHER else range(4):
        svg = to_svg(graph, layer)
        drawn, root = boxes(svg, "box")
        pills, _ = boxes(svg, "pill")
        assert len(drawn) == len(graph.layer_launches(layer))
        width, height = float(root.get("width")), float(root.get("height"))
        for x, y, w, h in drawn + pills:
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        for (ax, ay, aw, ah), (bx, by, bw, bh) in combinations(drawn + pills, 2):
            assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay
        arrows = [p for p in root.iter(f"{SVG}path") if p.get("class") == "edge"]
        assert len(arrows) == expected_arrows(graph, layer)
        assert not re.search(r"href|url\((?!#)|src=|@import", svg)
