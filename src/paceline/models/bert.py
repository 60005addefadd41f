"""BERT, MiniLM: an encoder. Every token sees all others; a norm follows each residual sum."""

from __future__ import annotations

from paceline.errors import UnsupportedModelError
from paceline.models import base
from paceline.models.base import GGUFSource, HFSource, ModelConfig
from paceline.plan.plan import Plan, Value

GGUF_ARCHITECTURES: tuple[str, ...] = ()
HF_TYPES = ("bert",)
INTERLEAVED_ROPE = False
NORM_OFFSET = 0.0
GGUF_NAMES: dict[str, str] = {}


def config_from_gguf(source: GGUFSource) -> ModelConfig:
    raise UnsupportedModelError(
        f"{source.fields.where}: BERT is read from a folder of safetensors, not from GGUF"
    )


def config_from_hf(source: HFSource) -> ModelConfig:
    fields = source.fields
    base.refuse(
        fields, hidden_act="gelu", position_embedding_type="absolute", is_decoder=False,
        add_cross_attention=False,
    )  # fmt: skip
    hidden = fields.integer("hidden_size", high=1 << 20)
    layers = fields.integer("num_hidden_layers", high=1024)
    heads = fields.integer("num_attention_heads", high=1 << 12)
    if hidden % heads:
        raise UnsupportedModelError(
            f"{fields.where}: hidden_size {hidden} is no multiple of {heads} heads"
        )
    return ModelConfig(
        family="bert", vocab_size=fields.integer("vocab_size", high=1 << 24), hidden_size=hidden,
        num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads,
        intermediate_size=fields.integer("intermediate_size", high=1 << 24),
        norm_eps=fields.number("layer_norm_eps", 1e-12, high=1.0),
        max_context=fields.integer("max_position_embeddings", high=1 << 20),
        num_token_types=fields.integer("type_vocab_size", 2, high=1 << 16),
        rope=(), window=(0,) * layers, attention_scale=(hidden // heads) ** -0.5,
        tie_embeddings=True, attention_bias=True, is_causal=False,
    )  # fmt: skip


def plan(config: ModelConfig) -> Plan:
    """Its output is the hidden states of the last layer."""
    plan = Plan()
    x = _embeddings(plan, config)
    for i in range(config.num_layers):
        layer = f"encoder.layer.{i}."
        h = plan.add(x, _attention(plan, config, x, i))
        x = _norm(plan, config, h, f"{layer}attention.output.")
        h = plan.act(
            _dense(plan, x, f"{layer}intermediate.dense", config.intermediate_size), "gelu"
        )
        h = plan.add(x, _dense(plan, h, f"{layer}output.dense", config.hidden_size))
        x = _norm(plan, config, h, f"{layer}output.")
    plan.output("hidden", plan.select(x))
    return plan


def _embeddings(plan: Plan, config: ModelConfig) -> Value:
    """Of words, positions and the first token type: a text alone is all of that one."""
    name, hidden = "embeddings.{}_embeddings.weight", config.hidden_size
    x = plan.embed(name.format("word"), hidden)
    types = name.format("token_type")
    x = plan.add(x, plan.embed(types, hidden, index="zero", rows=config.num_token_types))
    positions = name.format("position")
    x = plan.add(x, plan.embed(positions, hidden, index="position", rows=config.max_context))
    return _norm(plan, config, x, "embeddings.")


def _attention(plan: Plan, config: ModelConfig, x: Value, layer: int) -> Value:
    name, heads = f"encoder.layer.{layer}.attention.", config.num_heads
    q, k, v = (
        _dense(plan, x, f"{name}self.{part}", config.hidden_size)
        for part in ("query", "key", "value")
    )
    mixed = plan.attention(
        q, k, v, layer=layer, heads=heads, kv_heads=heads, scale=config.attention_scale,
        is_causal=False,
    )  # fmt: skip
    return _dense(plan, mixed, f"{name}output.dense", config.hidden_size)


def _dense(plan: Plan, x: Value, name: str, cols: int) -> Value:
    return plan.linear(x, f"{name}.weight", cols, f"{name}.bias")


def _norm(plan: Plan, config: ModelConfig, x: Value, name: str) -> Value:
    return plan.layer_norm(x, f"{name}LayerNorm.weight", f"{name}LayerNorm.bias", config.norm_eps)
