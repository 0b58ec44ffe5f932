"""Checkpoints: safetensors and GGUF in, torch tensors named as the graph names them out."""

from flintc.checkpoint.checkpoint import Checkpoint, LoadReport, SpecMatch, open_checkpoint

__all__ = ["Checkpoint", "LoadReport", "SpecMatch", "open_checkpoint"]
