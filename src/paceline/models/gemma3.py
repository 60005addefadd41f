"""Gemma 3, text: five windowed layers for each global one, two rope bases, norms on both sides."""

from __future__ import annotations

import numpy as np

from paceline.errors import ModelFormatError
from paceline.models import base
from paceline.models.base import GGUFSource, HFSource, ModelConfig, hf_rope, linear_rope
from paceline.plan.plan import Plan, RopeTable
from paceline.weights.fields import Fields

GGUF_ARCHITECTURES = ("gemma3",)
HF_TYPES = ("gemma3_text", "gemma3")
INTERLEAVED_ROPE = False
NORM_OFFSET = 1.0
GGUF_NAMES = base.GGUF_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PATTERN = 6  # every sixth layer is global
_27B_LAYERS = 62  # the only size whose query scale is not head_dim; GGUF files do not store it
# config.json of the released models leaves out what equals these.
_HF_DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 131072, "sliding_window": 4096, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def _kinds(num_layers: int, pattern: int) -> list[str]:
    return [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(num_layers)
    ]


def _gguf_globals(fields: Fields, key: str, num_layers: int) -> list[bool]:
    """Which layers are global. The key holds a period, or one "is windowed" a layer."""
    windowed = fields.values.get(key)
    if isinstance(windowed, np.ndarray):
        if windowed.shape != (num_layers,):
            raise ModelFormatError(f"{fields.where}: {key} must have {num_layers} entries")
        return [not w for w in windowed.tolist()]
    kinds = _kinds(num_layers, fields.integer(key, PATTERN))
    return [kind == "full_attention" for kind in kinds]


def config_from_gguf(source: GGUFSource) -> ModelConfig:
    fields, key = source.fields, source.key
    common = base.gguf_config(source)
    layers, dim = common["num_layers"], common["head_dim"]
    window = fields.integer(key("attention.sliding_window"))
    is_global = _gguf_globals(fields, key("attention.sliding_window_pattern"), layers)
    theta = fields.number(key("rope.freq_base_swa"), 1e4, low=1.001)
    local = linear_rope(base.rope_frequencies(dim, theta), 1.0)
    common["window"] = tuple(0 if g else window for g in is_global)
    common["rope"] = tuple(common["rope"][0] if g else local for g in is_global)
    if layers == _27B_LAYERS:
        common["attention_scale"] = (common["hidden_size"] / common["num_heads"]) ** -0.5
    return ModelConfig(
        family="gemma3", qk_norm=True, embed_scale=common["hidden_size"] ** 0.5,
        attention_softcap=fields.number(key("attn_logit_softcapping"), 0.0),
        logit_softcap=fields.number(key("final_logit_softcapping"), 0.0), **common,
    )  # fmt: skip


def config_from_hf(source: HFSource) -> ModelConfig:
    fields = Fields(_HF_DEFAULTS | dict(source.fields.values), source.fields.where)
    base.refuse(
        fields, hidden_activation="gelu_pytorch_tanh", attention_bias=False,
        use_bidirectional_attention=False,
    )  # fmt: skip
    ropes = _hf_ropes(fields)
    plain = {k: v for k, v in fields.values.items() if k not in ("rope_parameters", "rope_scaling")}
    common = base.hf_config(HFSource(fields=Fields(plain, fields.where), shapes=source.shapes))
    layers = common["num_layers"]
    kinds = _kinds(layers, fields.integer("sliding_window_pattern", PATTERN))
    windows = base.hf_windows(fields, layers, kinds)
    common["window"] = windows
    common["rope"] = tuple(ropes[0] if w == 0 else ropes[1] for w in windows)
    common["attention_scale"] = fields.number("query_pre_attn_scalar", low=1e-3) ** -0.5
    return ModelConfig(
        family="gemma3", qk_norm=True, embed_scale=common["hidden_size"] ** 0.5,
        attention_softcap=fields.number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0), **common,
    )  # fmt: skip


def _hf_ropes(fields: Fields) -> tuple[RopeTable, RopeTable]:
    """(global, local): under `rope_parameters` by layer type, or in the older flat keys."""
    dim, context = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    tables = []
    for kind, key in (
        ("full_attention", "rope_theta"),
        ("sliding_attention", "rope_local_base_freq"),
    ):
        by_type = fields.table("rope_parameters")
        if by_type.has("rope_type"):
            raise ModelFormatError(f"{by_type.where} must have one entry a layer type")
        scaling = by_type.table(kind)
        if kind == "full_attention" and not scaling.values:
            scaling = fields.table("rope_scaling")
        theta = scaling.number("rope_theta", fields.number(key, low=1.001), low=1.001)
        tables.append(hf_rope(scaling, dim, theta, context))
    return tables[0], tables[1]


def plan(config: ModelConfig) -> Plan:
    plan, eps = Plan(), config.norm_eps
    x = plan.scale(plan.embed(base.EMBEDDING, config.hidden_size), config.embed_scale)
    for i in range(config.num_layers):
        name = f"model.layers.{i}."
        h = plan.rms_norm(x, f"{name}input_layernorm.weight", eps)
        h = base.attention(plan, config, h, i)
        x = plan.add(x, plan.rms_norm(h, f"{name}post_attention_layernorm.weight", eps))
        h = plan.rms_norm(x, f"{name}pre_feedforward_layernorm.weight", eps)
        h = base.gated_mlp(plan, config, h, i, "gelu_tanh")
        x = plan.add(x, plan.rms_norm(h, f"{name}post_feedforward_layernorm.weight", eps))
    base.head(plan, config, x)
    return plan
