"""ModelConfig: what every family reads from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.plan import RopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. Per-layer tuples have one entry a layer."""

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
