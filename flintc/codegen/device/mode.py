"""The one switch between the GPU and Triton's interpreter."""

import triton.language as tl

#: True in a kernel loaded for Triton's interpreter, which has no inline assembly and no dependent launch,
#: truncates where the GPU rounds to nearest, and multiplies the bit patterns of BF16 operands in a dot.
INTERPRET: tl.constexpr = tl.constexpr(False)
