"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and a window on upper layers if asked for."""

from __future__ import annotations

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
from paceline.weights.fields import Fields

__all__ = ["GGUF_NAMES", "config_from_gguf", "config_from_hf", "plan", "windows"]

GGUF_ARCHITECTURES = ("qwen2",)
HF_TYPES = ("qwen2",)
INTERLEAVED_ROPE = False
NORM_OFFSET = 0.0


def windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The window, if used at all, holds from layer `max_window_layers` on."""
    first = num_layers
    if fields.flag("use_sliding_window", False):
        first = fields.integer("max_window_layers", 28, low=0)
    kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    return hf_windows(fields, num_layers, kinds)


def config_from_gguf(source: GGUFSource) -> ModelConfig:
    return ModelConfig(family="qwen2", attention_bias=True, **gguf_config(source))


def config_from_hf(source: HFSource) -> ModelConfig:
    refuse(source.fields, hidden_act="silu")
    common = hf_config(source)
    common["window"] = windows(source.fields, common["num_layers"])
    return ModelConfig(family="qwen2", attention_bias=True, **common)


plan = pre_norm_plan
