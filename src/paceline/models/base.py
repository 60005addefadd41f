"""ModelConfig and what the families share: reading configs, rope tables, the decoder's plan.

A family is a module of this package with the constants GGUF_ARCHITECTURES, HF_TYPES, GGUF_NAMES,
INTERLEAVED_ROPE (its GGUF files pair neighbouring q and k rows) and NORM_OFFSET (what its HF norm
weights lack), and the functions `config_from_gguf`, `config_from_hf` and `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.loading import load
from paceline.plan.plan import KeyBias, Plan, RopeTable, Value
from paceline.weights.fields import Fields

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Name of a layer's or the model's part in a GGUF file -> its canonical (HF) name.
GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Shape of a decoder or an encoder. Per-layer tuples have one entry a layer."""

    family: str  # a module of paceline.models
    vocab_size: int  # rows of the head, padding included
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_context: int
    rope: tuple[RopeTable, ...]
    window: tuple[int, ...]  # 0: global attention
    attention_scale: float
    tie_embeddings: bool
    attention_bias: bool = False  # q, k, v
    qk_norm: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    is_causal: bool = True  # False: an encoder, which embeds texts and writes none
    num_token_types: int = 0


class GGUFSource(Struct, frozen=True, kw_only=True):
    """What a family reads its config from: metadata, tensor shapes, rope divisors."""

    fields: Fields
    arch: str
    shapes: Mapping[str, tuple[int, ...]]
    rope_divisors: npt.NDArray[np.float32] | None = None

    def key(self, name: str) -> str:
        return f"{self.arch}.{name}"


class HFSource(Struct, frozen=True, kw_only=True):
    """config.json (its text part) and the tensors' shapes under canonical names."""

    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]


# ---- rope ----


def rope_frequencies(head_dim: int, theta: float) -> npt.NDArray[np.float64]:
    """theta ** (-2i / head_dim), [head_dim / 2]."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def linear_rope(inv_freq: npt.NDArray[np.float64], factor: float) -> RopeTable:
    return RopeTable(tuple((inv_freq / factor).tolist()))


def llama3_rope(
    inv_freq: npt.NDArray[np.float64], *, factor: float, low: float, high: float, context: int
) -> RopeTable:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, a ramp in between."""
    turns = context * inv_freq / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return RopeTable(tuple((inv_freq * ((1 - smooth) / factor + smooth)).tolist()))


def yarn_rope(
    head_dim: int, theta: float, *, factor: float, context: int, beta_fast: float = 32.0,
    beta_slow: float = 1.0, mscale: float | None = None,
) -> RopeTable:  # fmt: skip
    """YaRN (Peng 2023): interpolation by parts; cos and sin times `mscale`, 0.1 ln(factor) + 1."""
    inv_freq = rope_frequencies(head_dim, theta)

    def dim_of(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(beta_fast)), 0)
    high = min(math.ceil(dim_of(beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return RopeTable(tuple(scaled.tolist()), yarn_mscale(factor) if mscale is None else mscale)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def hf_rope(scaling: Fields, head_dim: int, theta: float, max_context: int) -> RopeTable:
    """Table of `rope_scaling` (or `rope_parameters`): default, linear, llama3, yarn."""
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    inv_freq = rope_frequencies(head_dim, theta)
    if kind == "default":
        return linear_rope(inv_freq, 1.0)
    factor = scaling.number("factor", low=1e-3, high=1e6)
    if kind == "linear":
        return linear_rope(inv_freq, factor)
    context = scaling.integer("original_max_position_embeddings", max_context)
    if kind == "llama3":
        low = scaling.number("low_freq_factor", low=1e-3)
        high = scaling.number("high_freq_factor", low=1e-3)
        if high <= low:
            raise ModelFormatError(f"{scaling.where}: high_freq_factor must be above {low}")
        return llama3_rope(inv_freq, factor=factor, low=low, high=high, context=context)
    if kind == "yarn":
        mscale = scaling.optional_number("attention_factor")
        weights = [scaling.optional_number(key) for key in ("mscale", "mscale_all_dim")]
        if mscale is None and weights[0] and weights[1]:
            mscale = yarn_mscale(factor, weights[0]) / yarn_mscale(factor, weights[1])
        return yarn_rope(
            head_dim, theta, factor=factor, context=context, mscale=mscale,
            beta_fast=scaling.number("beta_fast", 32.0, low=1e-3),
            beta_slow=scaling.number("beta_slow", 1.0, low=1e-3),
        )  # fmt: skip
    raise UnsupportedModelError(
        f"{scaling.where}: rope type {kind!r} is not supported: default, linear, llama3, yarn are"
    )


def gguf_rope(source: GGUFSource, head_dim: int, theta: float, max_context: int) -> RopeTable:
    """Table of `rope.scaling.*` (none, linear, yarn) and of the tensor rope_freqs.weight."""
    fields, key = source.fields, source.key
    kind = fields.text(key("rope.scaling.type"), "none")
    if fields.has(key("rope.scale_linear")):  # before 2023-10
        factor, kind = fields.number(key("rope.scale_linear"), low=1e-3, high=1e6), "linear"
    else:
        factor = fields.number(key("rope.scaling.factor"), 1.0, low=1e-3, high=1e6)
    if kind == "yarn":
        weight = fields.number(key("rope.scaling.attn_factor"), 1.0)
        return yarn_rope(
            head_dim, theta, factor=factor, mscale=yarn_mscale(factor) * weight,
            context=fields.integer(key("rope.scaling.original_context_length"), max_context),
            beta_fast=fields.number(key("rope.scaling.yarn_beta_fast"), 32.0, low=1e-3),
            beta_slow=fields.number(key("rope.scaling.yarn_beta_slow"), 1.0, low=1e-3),
        )  # fmt: skip
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{fields.where}: {key('rope.scaling.type')} {kind!r} is not supported: "
            "none, linear, yarn are"
        )
    inv_freq = rope_frequencies(head_dim, theta)
    if source.rope_divisors is not None:
        divisors = source.rope_divisors.astype(np.float64)
        if divisors.shape != inv_freq.shape or not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ModelFormatError(
                f"{fields.where}: rope_freqs.weight must hold {len(inv_freq)} positive numbers"
            )
        inv_freq = inv_freq / divisors
    return linear_rope(inv_freq, factor if kind == "linear" else 1.0)


# ---- configs ----


def gguf_config(source: GGUFSource) -> dict[str, Any]:
    """The ModelConfig fields that all families store alike."""
    fields, key = source.fields, source.key
    if fields.integer(key("expert_count"), 0, low=0):
        raise UnsupportedModelError(f"{fields.where}: mixtures of experts are not supported")
    embedding = source.shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelFormatError(f"{fields.where}: the matrix token_embd.weight is missing")
    hidden = fields.integer(key("embedding_length"), high=1 << 20)
    num_layers = fields.integer(key("block_count"), high=1024)
    heads = fields.integer(key("attention.head_count"), high=1 << 12)
    head_dim = fields.integer(key("attention.key_length"), max(hidden // heads, 1), high=1024)
    if fields.integer(key("attention.value_length"), head_dim) != head_dim:
        raise UnsupportedModelError(f"{fields.where}: key and value heads differ in size")
    max_context = fields.integer(key("context_length"))
    theta = fields.number(key("rope.freq_base"), 10000.0, low=1.001)
    rotated = fields.integer(key("rope.dimension_count"), head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"{fields.where}: rope over {rotated} of {head_dim} columns is not supported"
        )
    return {
        "vocab_size": embedding[0], "hidden_size": hidden, "num_layers": num_layers,
        "num_heads": heads, "head_dim": head_dim, "max_context": max_context,
        "num_kv_heads": fields.integer(key("attention.head_count_kv"), heads, high=1 << 12),
        "intermediate_size": fields.integer(key("feed_forward_length"), high=1 << 24),
        "norm_eps": fields.number(key("attention.layer_norm_rms_epsilon"), high=1.0),
        "rope": (gguf_rope(source, head_dim, theta, max_context),) * num_layers,
        "window": (0,) * num_layers,
        "attention_scale": fields.number(key("attention.scale"), head_dim**-0.5),
        "tie_embeddings": "output.weight" not in source.shapes,
    }  # fmt: skip


def hf_config(source: HFSource, *, head_dim: int | None = None) -> dict[str, Any]:
    """The ModelConfig fields that all families store alike; `head_dim` is the family's default."""
    fields = source.fields
    hidden = fields.integer("hidden_size", high=1 << 20)
    num_layers = fields.integer("num_hidden_layers", high=1024)
    heads = fields.integer("num_attention_heads", high=1 << 12)
    head_dim = fields.integer("head_dim", head_dim or max(hidden // heads, 1), high=1024)
    max_context = fields.integer("max_position_embeddings", 2048)
    rope = fields.table("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0, low=1.001), low=1.001)
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1:
        raise UnsupportedModelError(f"{fields.where}: partial rope is not supported")
    return {
        "vocab_size": fields.integer("vocab_size", high=1 << 24), "hidden_size": hidden,
        "num_layers": num_layers, "num_heads": heads, "head_dim": head_dim,
        "max_context": max_context,
        "num_kv_heads": fields.integer("num_key_value_heads", heads, high=1 << 12),
        "intermediate_size": fields.integer("intermediate_size", high=1 << 24),
        "norm_eps": fields.number("rms_norm_eps", 1e-6, high=1.0),
        "rope": (hf_rope(rope, head_dim, theta, max_context),) * num_layers,
        "window": (0,) * num_layers,
        "attention_scale": head_dim**-0.5,
        "tie_embeddings": hf_tied(source),
    }  # fmt: skip


def hf_tied(source: HFSource) -> bool:
    """Whether the head is the embedding: as the flag says, else as the tensors say."""
    has_head = HEAD in source.shapes
    tied = source.fields.optional_flag("tie_word_embeddings")
    if tied is False and not has_head:
        raise ModelFormatError(
            f"{source.fields.where}: tie_word_embeddings is false but there is no {HEAD}: "
            "the folder is incomplete, or set tie_word_embeddings to true"
        )
    return not has_head if tied is None else tied


def hf_windows(fields: Fields, num_layers: int, kinds: list[str]) -> tuple[int, ...]:
    """Window of each layer: `layer_types` of the config, else the `kinds` the family gives."""
    listed = fields.values.get("layer_types") or kinds
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelFormatError(f"{fields.where}: layer_types must list {num_layers} layers")
    known = {"full_attention": 0, "sliding_attention": 0}
    if "sliding_attention" in listed:
        known["sliding_attention"] = fields.integer("sliding_window")
    for kind in listed:
        if kind not in known:
            raise UnsupportedModelError(f"{fields.where}: layer type {kind!r} is not supported")
    return tuple(known[kind] for kind in listed)


def refuse(fields: Fields, **unsupported: Any) -> None:
    """Raise UnsupportedModelError if a key has another value than the one that is supported."""
    for key, supported in unsupported.items():
        value = fields.values.get(key, supported)
        if value is not None and value != supported:
            raise UnsupportedModelError(
                f"{fields.where}: {key} {value!r} is not supported, only {supported!r} is"
            )


# ---- plans ----


def build_plan(config: ModelConfig) -> Plan:
    """The plan of the config's family."""
    plan: Plan = load("models", config.family).plan(config)
    return plan


def attention(plan: Plan, config: ModelConfig, x: Value, layer: int) -> Value:
    """q, k, v projections, their norms, rope, attention over the KV cache, output projection."""
    name = f"model.layers.{layer}.self_attn."
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def project(part: str, n: int) -> Value:
        bias = f"{name}{part}_proj.bias" if config.attention_bias else None
        return plan.linear(x, f"{name}{part}_proj.weight", n * dim, bias)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    if config.qk_norm:
        q = plan.rms_norm(q, f"{name}q_norm.weight", config.norm_eps, heads)
        k = plan.rms_norm(k, f"{name}k_norm.weight", config.norm_eps, kv_heads)
    rope = config.rope[layer]
    has_key_bias = config.attention_bias and not config.qk_norm  # a norm would change it
    q, k = plan.rope(q, heads, rope), plan.rope(k, kv_heads, rope)
    mixed = plan.attention(
        q, k, v, layer=layer, heads=heads, kv_heads=kv_heads, scale=config.attention_scale,
        window=config.window[layer], softcap=config.attention_softcap,
        key_bias=KeyBias(f"{name}k_proj.bias", rope) if has_key_bias else None,
    )  # fmt: skip
    return plan.linear(mixed, f"{name}o_proj.weight", config.hidden_size)


def gated_mlp(plan: Plan, config: ModelConfig, x: Value, layer: int, act: Any = "silu") -> Value:
    """down(act(gate(x)) * up(x))."""
    name, inner = f"model.layers.{layer}.mlp.", config.intermediate_size
    gate = plan.linear(x, f"{name}gate_proj.weight", inner)
    up = plan.linear(x, f"{name}up_proj.weight", inner)
    hidden = plan.gated_act(gate, up, act)
    return plan.linear(hidden, f"{name}down_proj.weight", config.hidden_size)


def head(plan: Plan, config: ModelConfig, x: Value) -> None:
    """Final norm and logits, of the rows that need them."""
    x = plan.rms_norm(plan.select(x), "model.norm.weight", config.norm_eps)
    logits = plan.linear(x, EMBEDDING if config.tie_embeddings else HEAD, config.vocab_size)
    if config.logit_softcap > 0:
        logits = plan.softcap(logits, config.logit_softcap)
    plan.output("logits", logits)


def pre_norm_plan(config: ModelConfig) -> Plan:
    """Llama's decoder: x += attention(norm(x)); x += mlp(norm(x)), a layer after the other."""
    plan = Plan()
    x = plan.embed(EMBEDDING, config.hidden_size)
    for i in range(config.num_layers):
        name = f"model.layers.{i}."
        h = plan.rms_norm(x, f"{name}input_layernorm.weight", config.norm_eps)
        x = plan.add(x, attention(plan, config, h, i))
        h = plan.rms_norm(x, f"{name}post_attention_layernorm.weight", config.norm_eps)
        x = plan.add(x, gated_mlp(plan, config, h, i))
    head(plan, config, x)
    return plan


def weight_shapes(plan: Plan, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the plan of a family reads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in plan.ops:
        if op.name == "embed":
            shapes[op.weights[0]] = (op.attrs["num_rows"] or vocab_size, op.out.cols)
        elif op.name == "linear":
            shapes[op.weights[0]] = (op.out.cols, op.inputs[0].cols)
            shapes |= {bias: (op.out.cols,) for bias in op.attrs["biases"] if bias}
        elif op.name == "rms_norm":
            shapes[op.weights[0]] = (op.out.cols // op.attrs["heads"],)
        elif op.name == "layer_norm":
            shapes |= {name: (op.out.cols,) for name in op.weights}
    return shapes
