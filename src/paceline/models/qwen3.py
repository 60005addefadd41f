"""Qwen3 (dense): Llama with a norm on each head of q and k, and its own head size."""

from __future__ import annotations

from paceline.models.base import (
    GGUF_NAMES,
    GGUFSource,
    HFSource,
    ModelConfig,
    gguf_config,
    hf_config,
    pre_norm_plan,
    refuse,
)
from paceline.models.qwen2 import windows

__all__ = ["GGUF_NAMES", "config_from_gguf", "config_from_hf", "plan"]

GGUF_ARCHITECTURES = ("qwen3",)
HF_TYPES = ("qwen3",)
INTERLEAVED_ROPE = False
NORM_OFFSET = 0.0


def config_from_gguf(source: GGUFSource) -> ModelConfig:
    return ModelConfig(family="qwen3", qk_norm=True, **gguf_config(source))


def config_from_hf(source: HFSource) -> ModelConfig:
    refuse(source.fields, hidden_act="silu", attention_bias=False)
    common = hf_config(source, head_dim=128)
    common["window"] = windows(source.fields, common["num_layers"])
    return ModelConfig(family="qwen3", qk_norm=True, **common)


plan = pre_norm_plan
