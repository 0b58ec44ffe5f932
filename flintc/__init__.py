"""flintc: a declarative kernel-fusion compiler for the Flint language model."""
