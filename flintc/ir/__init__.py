"""The intermediate representation: graphs of primitive ops, their launches, and the plans made of them.

Building, verifying and printing are modules of their own: `build`, `verify`, `printer`.
"""

from flintc.ir.graph import Crossing, Dependent, Graph, Launch, Op, Value
from flintc.ir.lower import lower_attention
from flintc.ir.ops import OPS, OpTypeError, infer
from flintc.ir.serialize import graph_from_json, graph_to_json, plan_from_json, plan_to_json
from flintc.ir.types import TensorType, resolve

__all__ = [
    "OPS",
    "Crossing",
    "Dependent",
    "Graph",
    "Launch",
    "Op",
    "OpTypeError",
    "TensorType",
    "Value",
    "graph_from_json",
    "graph_to_json",
    "infer",
    "lower_attention",
    "plan_from_json",
    "plan_to_json",
    "resolve",
]
