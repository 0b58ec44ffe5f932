"""Kernel families. Each role a pass can form (and each lone op) names the function that selects its kernel."""

from flintc.codegen.families import attention, elementwise, experts, gemv, heads, route, rowwise, topk
from flintc.codegen.selection import Selector

SELECTORS: dict[str, Selector] = {
    **attention.SELECTORS,
    **heads.SELECTORS,
    **topk.SELECTORS,
    **elementwise.SELECTORS,
    **rowwise.SELECTORS,
    **gemv.SELECTORS,
    **experts.SELECTORS,
    **route.SELECTORS,
}
