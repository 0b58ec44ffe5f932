"""Sampling defaults and stop ids from generation_config.json, config.json and GGUF metadata."""

import json

import pytest

from flintc.errors import CheckpointError
from flintc.runtime.generation import read_defaults
from flintc.runtime.sampling import SamplingParams


def defaults(folder, content, metadata=None):
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_defaults(folder, metadata or {})


def test_without_a_file_the_published_defaults(tmp_path):
    for folder in (tmp_path, None):
        got = read_defaults(folder, {})
        assert (got.params.temperature, got.params.top_p, got.params.top_k) == (1.0, 0.95, 20)
        assert got.stop_ids == frozenset()


def test_values_of_the_file_and_defaults_for_the_rest(tmp_path):
    got = defaults(tmp_path, {"temperature": 0.6, "top_k": None, "eos_token_id": [3, 5], "pad_token_id": 9})
    assert got.params == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert got.stop_ids == {3, 5}
    assert defaults(tmp_path, {"do_sample": False, "temperature": 0.6}).params.temperature == 0.0
    assert defaults(tmp_path, {"do_sample": True, "temperature": 0.6}).params.temperature == 0.6


def test_where_stop_ids_come_from(tmp_path):
    config = {"eos_token_id": 7}
    assert defaults(tmp_path, {"eos_token_id": 3}, config).stop_ids == {3}
    assert defaults(tmp_path, {"temperature": 1.0}, config).stop_ids == {7}
    assert read_defaults(None, {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 0}).stop_ids == {4, 0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": float("inf")}, "top_k is inf, expected a number"),
        ({"top_k": float("nan")}, "top_k is nan, expected a number"),
        ({"temperature": 10**400}, "temperature is 1000.*, expected a number"),
        ({"top_p": 3}, "top_p is 3"),
        ({"eos_token_id": ["<|end|>"]}, "eos_token_id .* expected token ids"),
        ([], "expected a JSON object"),
    ],
)
def test_impossible_values_name_the_file(tmp_path, content, words):
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{words}"):
        defaults(tmp_path, content)
