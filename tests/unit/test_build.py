"""Names, cache files and sources of a model on disk."""

import pytest

from paceline.backends import evening
from paceline.config import EngineConfig
from paceline.engine.build import _kv_identity, display_name, packed_cache_path, source_files
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import random_model, write_gguf


def test_a_file_is_served_under_its_stem_and_a_folder_under_its_name(tmp_path, monkeypatch):
    (tmp_path / "tiny.Q4_0.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert display_name("tiny.Q4_0.gguf") == "tiny.Q4_0"
    assert display_name(".") == tmp_path.name
    assert display_name("smollm2-135m") == "smollm2-135m"
    assert display_name("org/model") == "org/model"


def test_packed_weights_lie_beside_the_model(tmp_path):
    assert packed_cache_path(tmp_path) == tmp_path / "paceline.packed"
    assert packed_cache_path(tmp_path / "a.gguf") == tmp_path / "a.gguf.packed"


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (["a.gguf", "b.gguf"], "a.gguf", ["a.gguf"]),
        (
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b-00001-of-00002.gguf"],
            "a-00001-of-00002.gguf",
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
        ),
        (["model-1.safetensors", "config.json", "model-0.safetensors"], ".",
         ["model-0.safetensors", "model-1.safetensors"]),
    ],
)  # fmt: skip
def test_every_weight_file_of_a_model_is_a_source(tmp_path, names, asked, found):
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in source_files(tmp_path / asked)] == found


@pytest.mark.parametrize(
    ("family", "kv_dtype", "differs"),
    [("qwen2", "int8", True), ("qwen2", "fp8", True), ("qwen2", "k8v4", True),
     ("qwen2", "int4", True), ("qwen2", "f16", False), ("llama", "int8", False)],
)  # fmt: skip
def test_stored_blocks_of_biased_keys_are_of_one_rule(
    tmp_path, monkeypatch, family, kv_dtype, differs
):
    checkpoint = open_checkpoint(write_gguf(random_model(family), tmp_path / "model.gguf"))
    config = EngineConfig(kv_dtype=kv_dtype)
    before = _kv_identity(checkpoint, config, "avx2")
    monkeypatch.setattr(evening, "VERSION", "another")
    assert (_kv_identity(checkpoint, config, "avx2") != before) == differs
