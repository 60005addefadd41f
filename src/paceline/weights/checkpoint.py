"""Checkpoint: a model on disk, whatever its container, under canonical (HF) tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.models.base import ModelConfig
from paceline.weights.tensor import QTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizerData:
    """The `tokenizer.ggml.*` keys. `tokens` and `merges` may be lazy sequences of str."""

    model: str  # "gpt2" (byte-level BPE) or "llama" (SPM)
    pre: str | None
    tokens: Sequence[str]
    token_types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eot_id: int | None
    add_bos: bool | None  # None: the key is absent
    add_eos: bool | None
    add_space_prefix: bool | None
    cache_key: str  # identifies the file, for a cache of the built tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTokenizerData:
    """`tokenizer.json` as bytes and `tokenizer_config.json` as a dict ({} where absent)."""

    json: bytes
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """From generation_config.json or the GGUF's keys; None where the file says nothing."""

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model. Tensors are views of mapped files until they are used."""

    path: Path
    source: str  # "gguf" or "safetensors"
    name: str
    config: ModelConfig
    tensors: Mapping[str, QTensor]
    tokenizer: GGUFTokenizerData | HFTokenizerData
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default" and named ones
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
