"""Bundles: a plan and its compiled kernels as data, written whole, verified when read."""

from flintc.bundle.bundle import Bundle, Origin, build_bundle, load_bundle, write_bundle
from flintc.bundle.manifest import FileRecord, KernelRecord, Manifest
from flintc.bundle.matching import check_same_model, first_difference

__all__ = [
    "Bundle",
    "FileRecord",
    "KernelRecord",
    "Manifest",
    "Origin",
    "build_bundle",
    "check_same_model",
    "first_difference",
    "load_bundle",
    "write_bundle",
]
