"""Memory by format from a shape alone: published sizes, and what quantising really writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.catalog.shapes import SHAPES, config_file, named_shape, read_shape, shape_of
from paceline.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from paceline.measure.footprint import (
    FORMATS,
    TARGETS,
    counted_size,
    kv_sizes,
    num_parameters,
    step_size,
    weight_size,
)
from paceline.quantize.recipe import new_recipe
from paceline.quantize.source import open_source
from tests.tiny import random_model, write_hf

# As the models' cards and their safetensors files have it.
PUBLISHED = {
    "smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "mistral-7b": 7_248_023_552, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360, "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert num_parameters(named_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", SHAPES)
def test_every_known_shape_is_read_by_its_family(name: str) -> None:
    model = named_shape(name)
    assert model.num_layers == SHAPES[name].layers
    assert weight_size(model, "int4, 64").bits(num_parameters(model)) < 8


def test_eight_billion_parameters_take_32_16_8_and_4_gb_and_their_scales() -> None:
    count = 8 * 10**9
    sizes = {name: counted_size(count, name) for name in FORMATS}
    wanted = {"f32": 32, "bf16": 16, "int8, 64": 8, "int4, 64": 4}
    assert {name: sizes[name].code_bytes / 1e9 for name in wanted} == wanted
    assert sizes["bf16"].extra_bytes == 0
    # An f16 scale for each 64 weights is a quarter of a bit a weight.
    assert sizes["int8, 64"].extra_bytes == sizes["int4, 64"].extra_bytes == count // 32
    assert sizes["int4, 128"].bits(count) == pytest.approx(4.125)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("name", TARGETS)
def test_sizes_are_those_that_quantising_writes(tmp_path: Path, family: str, name: str) -> None:
    path = write_hf(random_model(family, vocab_size=320), tmp_path / "m", fmt="bf16")
    source = open_source(path)
    recipe = new_recipe(source, tmp_path / "o", method="rtn", target=TARGETS[name])
    written = sum(tensor.num_bytes for tensor in recipe.tensors)
    assert weight_size(source.checkpoint.config, name).weight_bytes == written


def test_a_cache_of_whole_blocks_takes_its_bytes_in_each_format() -> None:
    sizes = kv_sizes(named_shape("llama-3.1-8b"), seqs=8, context=8190)
    assert sizes["f16"] == 8 * 8192 * 2 * 32 * 8 * 128 * 2
    assert sizes["f32"] == 2 * sizes["bf16"]
    assert sizes["int8"] == 8 * 8192 * 2 * 32 * 8 * (128 + 2)


def test_a_step_holds_the_logits_of_its_sequences_and_the_tables_of_its_context() -> None:
    model = named_shape("llama-3.1-8b")
    step = step_size(model, "int4, 64", seqs=8, context=8192)
    assert step.activation_bytes > 32 * 128256 * 4
    assert step.table_bytes == 8192 * 128 * 4
    more = step_size(model, "int4, 64", seqs=256, context=8192)
    assert more.activation_bytes > step.activation_bytes


def test_a_config_without_weights_is_enough(tmp_path: Path) -> None:
    folder = write_hf(random_model("qwen2", vocab_size=320), tmp_path / "m")
    known = open_source(folder).checkpoint.config
    assert config_file(folder) is None  # its weights tell more
    (folder / "model.safetensors").unlink()
    assert config_file(folder) == config_file(folder / "config.json") == folder / "config.json"
    assert read_shape(folder / "config.json") == known


def test_a_head_that_nobody_speaks_of_is_tied_in_gemma_alone() -> None:
    for name, is_tied in (("llama-3.1-8b", False), ("gemma3-1b", True)):
        config = SHAPES[name].config()
        del config["tie_word_embeddings"]
        assert shape_of(config, "c").tie_embeddings is is_tied


def test_what_is_no_shape_is_refused_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"do you mean llama-3\.1-8b"):
        named_shape("lama-3.1-8b")
    path = tmp_path / "config.json"
    for text, kind, message in (
        ("{", ModelFormatError, "cannot be read as a config"),
        ("[]", ModelFormatError, "one JSON object"),
        ("{}", ModelFormatError, "model_type is missing"),
        (json.dumps({"model_type": "rwkv"}), UnsupportedModelError, "'rwkv' is not supported"),
    ):
        path.write_text(text)
        with pytest.raises(kind, match=message):
            read_shape(path)
