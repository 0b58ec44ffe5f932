"""Fusion passes: which ops share a launch. A rule reads like the graph it matches; a pass is a set of rules."""

from flintc.passes.base import FusionPass, Pass
from flintc.passes.pipeline import BASELINE, PASSES, PipelineRun, Step, find_pass, run_pipeline

__all__ = ["BASELINE", "PASSES", "FusionPass", "Pass", "PipelineRun", "Step", "find_pass", "run_pipeline"]
