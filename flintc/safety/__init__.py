"""Proof that a plan's launches cannot race: every access of every launch, ordered by waits, launch by launch."""

from flintc.safety.check import check_plan, find_hazards
from flintc.safety.hazard import RULES, Hazard

__all__ = ["RULES", "Hazard", "check_plan", "find_hazards"]
