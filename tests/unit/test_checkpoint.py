"""Checkpoints: one model, two containers, the same names, weights and defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import (
    ModelFormatError,
    ModelNotFoundError,
    PacelineError,
    UnsupportedModelError,
)
from paceline.weights.checkpoint import GGUFTokenizerData, HFTokenizerData, open_checkpoint
from paceline.weights.tensor import dequantize, from_floats
from tests.tiny import (
    CHATML,
    TinyModel,
    TinyTokenizer,
    gguf_bytes,
    gguf_metadata,
    gguf_tensors,
    random_model,
    successor_model,
    write_gguf,
    write_hf,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]


def both(model: TinyModel, tmp_path: Path) -> list[Path]:
    return [write_gguf(model, tmp_path / "m.gguf"), write_hf(model, tmp_path / "m")]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_containers_give_the_same_weights_under_the_same_names(
    family: str, tmp_path: Path
) -> None:
    model = random_model(family)
    offset = 1 if family == "gemma3_text" else 0
    for path in both(model, tmp_path):
        tensors = open_checkpoint(path).tensors
        assert set(tensors) == set(model.tensors)
        assert len(tensors) == len(model.tensors)
        for name, value in model.tensors.items():
            expected = value + np.float32(offset) if name.endswith("norm.weight") else value
            np.testing.assert_array_equal(dequantize(tensors[name]), expected, err_msg=name)


def test_quantised_q_rows_of_a_llama_file_are_put_back_in_order(tmp_path: Path) -> None:
    model = random_model("llama")
    quantised = open_checkpoint(write_gguf(model, tmp_path / "q.gguf", fmt="q8_0"))
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"model.layers.1.self_attn.{name}.weight"
        tensor = quantised.tensors[full]
        assert tensor.format == "q8_0"
        np.testing.assert_allclose(dequantize(tensor), model.tensors[full], atol=5e-3)


def test_a_q_bias_of_a_llama_file_is_put_back_in_order_too(tmp_path: Path) -> None:
    model = random_model("llama", attention_bias=True)
    tensors = open_checkpoint(write_gguf(model, tmp_path / "m.gguf")).tensors
    name = "model.layers.0.self_attn.q_proj.bias"
    np.testing.assert_array_equal(dequantize(tensors[name]), model.tensors[name])


def test_weights_stay_views_of_the_file(tmp_path: Path) -> None:
    for path in both(random_model("qwen2"), tmp_path):
        tensors = open_checkpoint(path).tensors
        assert not any(tensors[name].data.flags.owndata for name in tensors)


def test_both_end_ids_are_found_in_both_containers(tmp_path: Path) -> None:
    """LOD-06."""
    tokenizer = TinyTokenizer()
    for path in both(successor_model([1, 2]), tmp_path):
        ends = open_checkpoint(path).generation.eos_ids
        assert set(ends) == {tokenizer.eos_id, tokenizer.eot_id}


def test_end_markers_that_no_key_names_are_found_by_their_text(tmp_path: Path) -> None:
    path = write_gguf(
        random_model(), tmp_path / "m.gguf",
        overrides={"tokenizer.ggml.eot_token_id": None, "tokenizer.ggml.eos_token_id": 7},
    )  # fmt: skip
    tokenizer = TinyTokenizer()
    assert set(open_checkpoint(path).generation.eos_ids) == {7, tokenizer.eos_id, tokenizer.eot_id}


def test_one_end_id_and_sampling_defaults_are_read(tmp_path: Path) -> None:
    folder = write_hf(random_model(), tmp_path / "m")
    settings = {"eos_token_id": 5, "temperature": 0.7, "top_k": 40, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    generation = open_checkpoint(folder).generation
    assert (generation.eos_ids, generation.temperature, generation.top_k) == ((5,), 0.7, 40)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation.eos_ids == (TinyTokenizer().eos_id,)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ModelFormatError, match="eos_token_id is '</s>'"):
        open_checkpoint(folder)


def test_chat_templates_of_every_place_are_found(tmp_path: Path) -> None:
    model = random_model()
    gguf = write_gguf(
        model, tmp_path / "m.gguf", overrides={"tokenizer.chat_template.tool_use": "tools"}
    )
    assert open_checkpoint(gguf).chat_templates == {"default": CHATML, "tool_use": "tools"}
    folder = write_hf(model, tmp_path / "m")
    assert open_checkpoint(folder).chat_templates == {"default": CHATML}
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(folder).chat_templates == {"default": "a", "rag": "b"}
    (folder / "chat_template.jinja").write_text("file")
    assert open_checkpoint(folder).chat_templates == {"default": "file", "rag": "b"}


def test_tokenizer_data_comes_along(tmp_path: Path) -> None:
    gguf, folder = both(random_model(tokenizer=TinyTokenizer(add_bos=True)), tmp_path)
    data = open_checkpoint(gguf).tokenizer
    assert isinstance(data, GGUFTokenizerData)
    assert (data.model, data.pre, data.add_bos, data.add_eos) == ("gpt2", "gpt-2", True, None)
    assert list(data.tokens) == TinyTokenizer().tokens
    assert data.bos_id == TinyTokenizer().bos_id
    hf = open_checkpoint(folder).tokenizer
    assert isinstance(hf, HFTokenizerData)
    assert json.loads(hf.json)["model"]["type"] == "BPE"
    assert hf.config["add_bos_token"] is True


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    for path in both(random_model().without("model.layers.1.mlp.up_proj.weight"), tmp_path):
        with pytest.raises(
            ModelFormatError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is mis"
        ):
            open_checkpoint(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    model = random_model().with_tensor("model.layers.0.mlp.up_proj.weight", np.ones((96, 64)))
    gguf, folder = both(model, tmp_path)
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up\.weight has shape \[96, 64\]"):
        open_checkpoint(gguf)
    with pytest.raises(ModelFormatError, match=r"up_proj.*asks for \[128, 64\]"):
        open_checkpoint(folder)


def test_an_untied_folder_without_head_is_refused(tmp_path: Path) -> None:
    model = random_model().without("lm_head.weight")
    with pytest.raises(ModelFormatError, match=r"no lm_head\.weight"):
        open_checkpoint(write_hf(model, tmp_path))


def test_a_head_is_not_kept_when_tied(tmp_path: Path) -> None:
    model = random_model().with_config(tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(write_hf(model, tmp_path)).tensors


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    gguf = write_gguf(
        random_model(), tmp_path / "m.gguf", overrides={"general.architecture": "rwkv7"}
    )
    folder = write_hf(random_model().with_config(model_type="rwkv7"), tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*gemma3, llama, qwen2, qwen3"):
        open_checkpoint(gguf)
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*llama, mistral, qwen2, qwen3"):
        open_checkpoint(folder)


def test_a_multimodal_folder_gives_its_text_model(tmp_path: Path) -> None:
    text = random_model("gemma3_text", tie_word_embeddings=True)
    config = {"model_type": "gemma3", "text_config": text.config, "vision_config": {}}
    for prefix in ("language_model.model.", "model.language_model."):
        tensors = {name.replace("model.", prefix, 1): value for name, value in text.tensors.items()}
        folder = tmp_path / prefix
        write_hf(TinyModel(config, tensors, text.tokenizer, eos_ids=(1,)), folder)
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config.family == "gemma3"
        assert set(checkpoint.tensors) == set(text.tensors)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 1 << 30}, "llama.block_count is '1073741824'"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two'"),
        ({"llama.attention.head_count": 0}, "head_count is '0'"),
        ({"llama.attention.head_count_kv": 3}, "4 heads cannot share 3"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is 'nan'"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope over 8 of 16"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.value_length": 32}, "differ in size"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"tokenizer.ggml.tokens": "none"}, "tokenizer.ggml.tokens must be an array"),
        ({"tokenizer.ggml.bos_token_id": ("i32", -1)}, "bos_token_id is '-1'"),
    ],
)
def test_a_bad_metadata_field_is_named(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    path = write_gguf(random_model(), tmp_path / "m.gguf", overrides=overrides)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("llama", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial rope"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "must list 2 layers"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is 'True'"),
    ],
)
def test_a_config_that_asks_for_what_we_lack_is_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    folder = write_hf(random_model(family).with_config(**fields), tmp_path)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        open_checkpoint(folder)


def test_rope_divisors_must_be_positive_and_as_many_as_frequencies(tmp_path: Path) -> None:
    model = random_model()
    for divisors in ([1.0] * 7, [0.0] * 8, [np.nan] * 8):
        tensors = gguf_tensors(model) | {"rope_freqs.weight": from_floats(divisors)}
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_bytes(gguf_metadata(model), tensors))
        with pytest.raises(ModelFormatError, match="must hold 8 positive numbers"):
            open_checkpoint(path)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 2_000), bit=st.integers(0, 7), part=st.sampled_from(["keys", "tensors"]))
def test_a_flipped_bit_in_the_header_is_at_worst_a_typed_error(
    tmp_path: Path, at: int, bit: int, part: str
) -> None:
    raw = bytearray(tiny_file())
    where = at if part == "keys" else raw.index(b"token_embd.weight") + at % 1_200
    raw[where] ^= 1 << bit
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path)
    except PacelineError:
        return
    for name in checkpoint.tensors:
        assert checkpoint.tensors[name].data.size


def tiny_file() -> bytes:
    model = random_model(
        hidden=32, heads=2, kv_heads=1, inner=32, tokenizer=TinyTokenizer(words=("hi",))
    )
    return gguf_bytes(gguf_metadata(model), gguf_tensors(model))


def test_an_absent_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
