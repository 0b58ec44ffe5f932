"""The JSON Schema of spec files, for editors."""

from __future__ import annotations

from typing import Any

from flintc.spec.model import Spec

#: Mappings that `extends` merges key by key, and that may therefore be partial in a file.
_MERGED = ("LayerSet", "Step", "WeightSpec")


def spec_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a spec file as written, `extends` included.

    A file that extends another needs only the keys it changes; which ops take which attributes is not part of it.
    """
    schema = Spec.model_json_schema(by_alias=True, mode="validation")
    required = [key for key in schema.pop("required") if key != "flintc"]
    for name in _MERGED:
        schema["$defs"][name].pop("required", None)
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "A spec in the same folder, or the name of a shipped one, that this file is laid over.",
    }
    schema["anyOf"] = [{"required": ["flintc", "name", "extends"]}, {"required": ["flintc", *required]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
