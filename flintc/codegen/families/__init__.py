"""Kernel families. Each role a pass can form (and each lone op) names the function that selects its kernel."""

from flintc.codegen.families import rowwise
from flintc.codegen.selection import Selector

SELECTORS: dict[str, Selector] = {
    **rowwise.SELECTORS,
}
