"""The model written down once: YAML to a validated spec, and a spec to a model with sizes."""

from flintc.spec.bind import bind_config, bind_gguf
from flintc.spec.bound import BoundModel, bind_defaults
from flintc.spec.load import load_spec, shipped_specs, spec_for
from flintc.spec.model import KNOWN_PASSES, OpEntry, Spec, WeightSpec
from flintc.spec.schema import spec_json_schema

__all__ = [
    "KNOWN_PASSES",
    "BoundModel",
    "OpEntry",
    "Spec",
    "WeightSpec",
    "bind_config",
    "bind_defaults",
    "bind_gguf",
    "load_spec",
    "shipped_specs",
    "spec_for",
    "spec_json_schema",
]
