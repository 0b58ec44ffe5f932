"""A fusion pass of your own, from its rule to a kernel that runs: the gated activation joins the dense gate/up product.

`python examples/own_pass.py` applies it to the shipped tiny model and checks one fused launch against the reference.
A pass that ships with flintc is the same thing in one file of flintc/passes/, listed in flintc/passes/pipeline.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from flintc import api
from flintc.codegen.interpret import load_interpreted
from flintc.codegen.planner import plan
from flintc.ir.printer import to_text
from flintc.ir.types import resolve
from flintc.passes import BASELINE, FusionPass, run_pipeline
from flintc.passes.pattern import op
from flintc.passes.rule import Rule, Rules, local
from flintc.reference import run_launch
from flintc.spec import bind_defaults, load_spec

gate_up = op("linear")
silu = op("silu_mul", gate_up=gate_up)

# A rule reads like the graph it matches, and states how each value inside the launch crosses from op to op.
RULE = Rule(
    name="gate/up with its activation",
    why="gate and up of one column meet in one program: the product need never reach memory",
    role="gate_up",  # chooses the kernel template
    ops=(gate_up, silu),
    crosses=(local(gate_up["y"]),),
)


@dataclass(frozen=True)
class DenseActivation(FusionPass):
    """The gated activation of a dense layer joins the product before it."""

    name: ClassVar[str] = "dense-activation"
    rules: ClassVar[Rules] = Rules((RULE,))


def main() -> None:
    """Apply the pass, show what it did, and run a fused launch in Triton's interpreter."""
    baseline = api.run_passes(bind_defaults(load_spec("tiny-flint")), stop_after=BASELINE).graph
    graph = run_pipeline(baseline, (DenseActivation(),)).graph
    print(f"{len(baseline.launches)} launches before, {len(graph.launches)} after\n")
    print(to_text(graph, layer=0))

    launch = next(x for x in graph.launches if x.role == "gate_up")
    made = plan(graph)
    planned = next(x for x in made.launches if x.name == launch.name)
    env = {"B": 3}
    given = {}
    for name in graph.reads(launch):
        shape = [resolve(d, env) for d in graph.values[name].type.shape]
        given[name] = torch.randn(shape).bfloat16()
    (output,) = graph.writes(launch)
    got = torch.full([resolve(d, env) for d in graph.values[output].type.shape], torch.nan, dtype=torch.bfloat16)
    tensors = {**given, output: got}
    arguments = [env[a.ref] if a.kind == "symbol" else tensors[a.ref] for a in planned.args]
    x, y, z = (resolve(d, env) for d in planned.grid)
    load_interpreted(made.kernels[planned.kernel])((x, y, z), arguments)

    want = run_launch(graph, launch, given)[output]
    print(f"largest difference from the reference: {(got.float() - want.float()).abs().max().item():.2g}")


if __name__ == "__main__":
    main()
