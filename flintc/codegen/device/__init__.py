"""Device helpers: ordinary ``@triton.jit`` functions that linters, the interpreter and unit tests see.

Rendering copies the helpers a kernel uses into its file, so that a generated kernel stands alone.
"""
