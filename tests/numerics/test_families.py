"""Logits of every family against transformers, on tiny random weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.weights.checkpoint import open_checkpoint
from tests.conftest import reference_logits
from tests.tiny import TinyModel, random_model, write_gguf, write_hf

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2}
# name -> (HF model type, config.json fields, whether GGUF metadata can say the same)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", {}, True),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, True),
    "llama, one KV head, high theta": ("llama", {"kv_heads": 1, "rope_theta": 5e5}, True),
    "llama, as many KV heads as heads": ("llama", {"kv_heads": 4}, True),
    "llama, head size apart from hidden": ("llama", {"head_dim": 32, "rms_norm_eps": 1e-3}, True),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, True),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3}, True),
    "llama, yarn": ("llama", {"rope_scaling": YARN}, True),
    "llama, yarn with mscales": ("llama", {"rope_scaling": DEEPSEEK_YARN}, False),
    "mistral, window shorter than the text": ("mistral", {"sliding_window": 7}, True),
    "mistral, no window": ("mistral", {"sliding_window": None}, True),
    "qwen2": ("qwen2", {}, True),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, True),
    "qwen2, window from layer 1": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, False,
    ),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}, True),
    "qwen3": ("qwen3", {"head_dim": 32}, True),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}, True),
    "gemma3": ("gemma3_text", {"layers": 4, "tie_word_embeddings": True}, True),
    "gemma3, own head": ("gemma3_text", {"layers": 3}, True),
    "gemma3, global layers scaled": (
        "gemma3_text",
        {"layers": 4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
        True,
    ),
    "gemma3, own query scale and capped logits": (
        "gemma3_text",
        {"layers": 2, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0},
        False,
    ),
}  # fmt: skip
NUM_TOKENS = 50


@pytest.fixture
def token_ids() -> list[int]:
    return np.random.default_rng(1).integers(0, 280, NUM_TOKENS).tolist()


def oracle_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_logits_equal_transformers_from_a_folder(
    name: str, tmp_path: Path, token_ids: list[int]
) -> None:
    family, fields, _ = CASES[name]
    folder = write_hf(random_model(family, seed=3, **fields), tmp_path / "model", shards=2)
    expected = oracle_logits(folder, token_ids)
    got = reference_logits(open_checkpoint(folder), token_ids)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2]])
def test_a_gguf_file_and_a_folder_of_one_model_give_the_same_logits(
    name: str, tmp_path: Path, token_ids: list[int]
) -> None:
    family, fields, _ = CASES[name]
    model = random_model(family, seed=3, **fields)
    folder = open_checkpoint(write_hf(model, tmp_path / "model"))
    file = open_checkpoint(write_gguf(model, tmp_path / "model.gguf"))
    expected = reference_logits(folder, token_ids)
    np.testing.assert_allclose(reference_logits(file, token_ids), expected, atol=2e-5, rtol=0)


def test_tied_builds_give_equal_logits_and_an_own_head_others(
    tmp_path: Path, token_ids: list[int]
) -> None:
    """LOD-03: the four builds, in both containers."""
    own = random_model("llama", seed=4)
    embedding = own.tensors["model.embed_tokens.weight"]
    tied = own.without("lm_head.weight").with_config(tie_word_embeddings=True)
    silent = own.without("lm_head.weight")
    del silent.config["tie_word_embeddings"]
    both = own.with_tensor("lm_head.weight", embedding).with_config(tie_word_embeddings=True)

    def logits(model: TinyModel, name: str) -> list[np.ndarray]:
        paths = [
            write_hf(model, tmp_path / name),
            write_gguf(model, tmp_path / f"{name}.gguf"),
        ]
        return [reference_logits(open_checkpoint(path), token_ids) for path in paths]

    expected, *others = [
        *logits(tied, "tied"), *logits(silent, "silent"), *logits(both, "both")
    ]  # fmt: skip
    for other in others:
        np.testing.assert_allclose(other, expected, atol=2e-5, rtol=0)
    for other in logits(own, "own"):
        assert np.abs(other - expected).max() > 0.1
