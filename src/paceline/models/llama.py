"""Llama 2 and 3, Mistral (its window on every layer), SmolLM2."""

from __future__ import annotations

from paceline.errors import UnsupportedModelError
from paceline.models.base import (
    GGUF_NAMES,
    GGUFSource,
    HFSource,
    ModelConfig,
    gguf_config,
    hf_config,
    hf_windows,
    pre_norm_plan,
    refuse,
)

__all__ = ["GGUF_NAMES", "config_from_gguf", "config_from_hf", "plan"]

GGUF_ARCHITECTURES = ("llama",)
HF_TYPES = ("llama", "mistral")
INTERLEAVED_ROPE = True
NORM_OFFSET = 0.0


def config_from_gguf(source: GGUFSource) -> ModelConfig:
    common = gguf_config(source)
    if "blk.0.attn_output.bias" in source.shapes:
        raise UnsupportedModelError(f"{source.fields.where}: an output bias is not supported")
    window = source.fields.integer(source.key("attention.sliding_window"), 0, low=0)
    common["window"] = (window,) * common["num_layers"]
    return ModelConfig(
        family="llama", attention_bias="blk.0.attn_q.bias" in source.shapes, **common
    )


def config_from_hf(source: HFSource) -> ModelConfig:
    fields = source.fields
    refuse(fields, hidden_act="silu", attention_bias=False, mlp_bias=False)
    common = hf_config(source)
    is_windowed = fields.text("model_type") == "mistral" and fields.has("sliding_window")
    kind = "sliding_attention" if is_windowed else "full_attention"
    layers = common["num_layers"]
    common["window"] = hf_windows(fields, layers, [kind] * layers)
    return ModelConfig(family="llama", **common)


plan = pre_norm_plan
