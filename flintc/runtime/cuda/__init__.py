"""The GPU backend: ahead-of-time compiled kernels, launched through the CUDA driver, captured in CUDA graphs."""
