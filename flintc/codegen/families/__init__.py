"""Kernel families. Each role a pass can form (and each lone op) names the function that selects its kernel."""

from flintc.codegen.families import attention, experts, gemv, route, rowwise
from flintc.codegen.selection import Selector

SELECTORS: dict[str, Selector] = {
    **attention.SELECTORS,
    **rowwise.SELECTORS,
    **gemv.SELECTORS,
    **experts.SELECTORS,
    **route.SELECTORS,
}
