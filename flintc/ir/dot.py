"""A graph in Graphviz's language: launches as nodes, grouped by layer, values as edges."""

from __future__ import annotations

from flintc.ir.graph import Graph, Launch


def to_dot(graph: Graph) -> str:
    """DOT text of every launch; each layer is a cluster."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  node [shape=box, style=rounded, fontname=monospace, fontsize=10];"]
    lines.append("  edge [fontname=monospace, fontsize=8];")
    for layer in (None, *graph.layers()):
        nodes = [_node(graph, launch) for launch in graph.layer_launches(layer)]
        if layer is None:
            lines += [f"  {node}" for node in nodes]
        else:
            lines += [
                f"  subgraph cluster_{layer} {{",
                f'    label="layer {layer}";',
                *(f"    {n}" for n in nodes),
                "  }",
            ]
    lines += [f"  {edge}" for launch in graph.launches for edge in _edges(graph, launch)]
    return "\n".join([*lines, "}"]) + "\n"


def _node(graph: Graph, launch: Launch) -> str:
    ops = "\\l".join(_text(graph.ops[o].kind) for o in launch.ops)
    return f'{_quoted(launch.name)} [label="{_text(launch.name)} [{_text(launch.role)}]\\n{ops}\\l"];'


def _edges(graph: Graph, launch: Launch) -> list[str]:
    sources: dict[str, list[str]] = {}
    for v in graph.reads(launch):
        if v in graph.producers:
            sources.setdefault(graph.launch_of[graph.producers[v]].name, []).append(v)
    return [
        f'{_quoted(source)} -> {_quoted(launch.name)} [label="{_text(", ".join(values))}"];'
        for source, values in sources.items()
    ]


def _quoted(name: str) -> str:
    return f'"{_text(name)}"'


def _text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
