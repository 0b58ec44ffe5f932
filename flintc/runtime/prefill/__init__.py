"""The general path: prompts in chunks of many rows, routine by routine. See docs/prefill.md."""
