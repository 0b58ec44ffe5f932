"""Finding, extending and picking specs; the shipped ones."""

import shutil
from pathlib import Path

import pytest
import yaml

import flintc.spec.load
from flintc.errors import CheckpointError, SpecError, UsageError
from flintc.passes.pipeline import PASSES
from flintc.spec import KNOWN_PASSES, bind_defaults, load_spec, shipped_specs, spec_for, spec_json_schema

SPECS = Path(__file__).parents[2] / "specs"
OTHER = Path(__file__).parents[1] / "data" / "other.yaml"


def test_shipped_specs_are_found_by_name_and_by_path():
    assert {"flint", "tiny-flint"} <= set(shipped_specs())
    by_name, by_path = load_spec("flint"), load_spec(SPECS / "flint.yaml")
    assert by_name == by_path == load_spec(str(SPECS / "flint.yaml"))


def test_shipped_specs_are_found_inside_an_installed_package(tmp_path, monkeypatch):
    """A wheel carries `specs/` inside the package, where there is no checkout around it."""
    shutil.copytree(SPECS, tmp_path / "flintc" / "specs")
    monkeypatch.setattr(flintc.spec.load, "__file__", str(tmp_path / "flintc" / "spec" / "load.py"))
    assert shipped_specs()["flint"] == tmp_path / "flintc" / "specs" / "flint.yaml"
    assert load_spec("tiny-flint").name == "tiny-flint"


def test_flint_has_the_published_sizes():
    """Against the table of the architecture, as published."""
    model = bind_defaults(load_spec("flint"))
    dims = model.dims
    assert (dims["layers"], dims["hidden"], dims["vocab"]) == (49, 2048, 150_144)
    assert (dims["heads"], dims["kv_heads"], dims["head_dim"], dims["window"]) == (32, 4, 128, 513)
    assert (dims["experts"], dims["experts_per_token"], dims["expert_width"]) == (256, 6, 512)
    assert (dims["dense_width"], dims["shared_width"], dims["context"]) == (6144, 1024, 262_144)
    assert model.numbers["scale"] == pytest.approx(128**-0.5) and model.numbers["eps"] == 1e-6
    assert model.layer_sets["full"] == {0, 1, *range(5, 46, 4), 48} and len(model.layer_sets["full"]) == 14
    assert model.layer_sets["dense"] == {0, 1}


def test_tiny_flint_is_flint_in_all_but_size():
    flint, tiny = load_spec("flint"), load_spec("tiny-flint")
    for section in ("blocks", "model", "weights", "checks", "pipeline"):
        assert getattr(flint, section) == getattr(tiny, section)
    model = bind_defaults(tiny)
    layers = frozenset(range(model.layers))
    for name in ("full", "dense"):
        assert model.layer_sets[name] and model.layer_sets[name] < layers
    assert model.dims["window"] < model.dims["context"]


def test_a_spec_is_picked_by_what_a_checkpoint_says_of_itself():
    assert spec_for(architecture="FlintForCausalLM").name == "flint"
    assert spec_for(gguf="flint").name == "flint"


@pytest.mark.parametrize("asked", [{"architecture": "FlintForCausaLM"}, {"gguf": "flimt"}, {"gguf": "llama"}, {}])
def test_an_unknown_architecture_is_refused(asked):
    with pytest.raises(CheckpointError, match="no spec for architecture"):
        spec_for(**asked)


def test_a_missing_file_names_the_nearest_shipped_spec(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'flint'"):
        load_spec(tmp_path / "flimt.yaml")
    with pytest.raises(UsageError, match="shipped specs: flint, tiny-flint"):
        load_spec("zzz")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_extends_a_sibling(tmp_path):
    shutil.copy(OTHER, tmp_path / "base.yaml")
    path = write(tmp_path, "s.yaml", "flintc: 1\nname: mine\nextends: base.yaml\nnumerics: {kv_page: 2}\n")
    spec, base = load_spec(path), load_spec(OTHER)
    assert spec.name == "mine" and spec.numerics.kv_page == 2
    assert spec.numerics.attention_chunk == base.numerics.attention_chunk and spec.blocks == base.blocks


def test_extends_a_shipped_spec_by_name(tmp_path):
    path = write(tmp_path, "s.yaml", "flintc: 1\nname: mine\nextends: flint\ndimensions: {layers: {default: 50}}\n")
    assert bind_defaults(load_spec(path)).layers == 50


def test_a_mistake_in_the_base_is_placed_in_the_base(tmp_path):
    write(tmp_path, "base.yaml", OTHER.read_text().replace("kv_page: 4", "kv_page: four"))
    path = write(tmp_path, "s.yaml", "flintc: 1\nname: mine\nextends: base.yaml\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert caught.value.place.file == str(tmp_path / "base.yaml")


@pytest.mark.parametrize(
    ("extends", "said"),
    [
        ("../base.yaml", "a file in the same folder"),
        ("/etc/hosts", "a file in the same folder"),
        ("..", "a file in the same folder"),
        ("''", "a file in the same folder"),
        ("[a]", "a file in the same folder"),
        ("link.yaml", "no spec 'link.yaml'"),
        ("basis.yaml", "did you mean 'base.yaml'?"),
        ("s.yaml", "in a circle"),
        ("round.yaml", "in a circle"),
    ],
)
def test_what_extends_refuses(extends, said, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(OTHER, tmp_path / "base.yaml")
    shutil.copy(OTHER, folder / "base.yaml")
    (folder / "link.yaml").symlink_to(tmp_path / "base.yaml")
    write(folder, "round.yaml", "extends: s.yaml\n")
    path = write(folder, "s.yaml", f"flintc: 1\nname: mine\nextends: {extends}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert said in str(caught.value)


def test_a_long_chain_of_extends_ends(tmp_path):
    for i in range(20):
        write(tmp_path, f"s{i}.yaml", f"extends: s{i + 1}.yaml\n")
    with pytest.raises(SpecError, match="a chain of more than 8 specs"):
        load_spec(tmp_path / "s0.yaml")


def test_the_passes_that_a_spec_may_name_are_those_that_there_are():
    assert tuple(PASSES) == KNOWN_PASSES


def test_a_spec_is_frozen():
    spec = load_spec("flint")
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"


def allowed_keys(schema: dict, path: list[str]) -> set[str]:
    node = schema
    for key in path:
        node = node["properties"][key]
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return set(node["properties"])


@pytest.mark.parametrize("path", [*SPECS.glob("*.yaml"), OTHER], ids=lambda p: p.stem)
def test_json_schema_knows_the_keys_of_real_specs(path):
    schema, data = spec_json_schema(), yaml.safe_load(path.read_text())
    assert schema["additionalProperties"] is False
    assert set(data) <= allowed_keys(schema, [])
    for section in ("match", "checks", "numerics", "model"):
        assert set(data.get(section, {})) <= allowed_keys(schema, [section])
    required = [set(choice["required"]) for choice in schema["anyOf"]]
    assert any(keys <= set(data) for keys in required)
