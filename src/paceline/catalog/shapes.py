"""Shapes: what a model looks like without its weights, from its config.json or by a known name."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.base import HEAD, HFSource, ModelConfig
from paceline.weights.checkpoint import find_family
from paceline.weights.fields import Fields

_MAX_BYTES = 1 << 24  # of a config.json
_EXTRAS: dict[str, dict[str, Any]] = {"gemma3_text": {"query_pre_attn_scalar": 256}}
_TIED_BY_DEFAULT = ("gemma",)  # families whose config.json says nothing where the head is tied


class Shape(Struct, frozen=True):
    """The sizes that a config.json would name; `tied`: the head is the embedding."""

    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    context: int

    def config(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type, "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied, "max_position_embeddings": self.context,
            **_EXTRAS.get(self.model_type, {}),
        }  # fmt: skip


# As the models' own config.json files have it.
SHAPES: dict[str, Shape] = {
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True, 8192),
    "smollm2-360m": Shape("llama", 960, 2560, 32, 15, 5, 64, 49152, True, 8192),
    "smollm2-1.7b": Shape("llama", 2048, 8192, 24, 32, 32, 64, 49152, True, 8192),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
    "llama-3.1-70b": Shape("llama", 8192, 28672, 80, 64, 8, 128, 128256, False, 131072),
    "mistral-7b": Shape("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, 32768),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 32768),
    "qwen2.5-7b": Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 32768),
    "qwen2.5-14b": Shape("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False, 32768),
    "qwen2.5-32b": Shape("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False, 32768),
    "qwen2.5-72b": Shape("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, False, 32768),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960),
    "qwen3-32b": Shape("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False, 40960),
    "gemma3-270m": Shape("gemma3_text", 640, 2048, 18, 4, 1, 256, 262144, True, 32768),
    "gemma3-1b": Shape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True, 32768),
}


def named_shape(name: str) -> ModelConfig:
    """Return the shape that is known by `name`; raises ModelNotFoundError with the names."""
    if name not in SHAPES:
        near = difflib.get_close_matches(name.lower(), SHAPES, 1)
        hint = f" (do you mean {near[0]}?)" if near else ""
        raise ModelNotFoundError(
            f"no shape is called {name!r}{hint}: choose {', '.join(SHAPES)}, or give the model's "
            "config.json"
        )
    return shape_of(SHAPES[name].config(), f"shape {name}")


def config_file(path: Path) -> Path | None:
    """Return the config.json that `path` is or holds without weights beside it; else None."""
    if path.is_file() and path.suffix == ".json":
        return path
    if path.is_dir() and (path / "config.json").exists() and not any(path.glob("*.safetensors")):
        return path / "config.json"
    return None


def read_shape(path: Path) -> ModelConfig:
    """Return the shape that a config.json tells of; raises ModelFormatError."""
    try:
        raw = path.read_bytes()
        config = json.loads(raw) if len(raw) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read as a config.json: {error}") from None
    if not isinstance(config, dict):
        raise ModelFormatError(f"{path} is no config.json of a model: it must hold one JSON object")
    return shape_of(config, str(path))


def shape_of(config: dict[str, Any], where: str) -> ModelConfig:
    """Return the ModelConfig of a config.json's content, as its family reads it."""
    fields = Fields(config, where)
    model_type = fields.text("model_type")
    family = find_family("HF_TYPES", model_type, where)
    text = fields.table("text_config")
    if text.values:  # a multimodal model: its text part
        fields = Fields({**config, **text.values, "model_type": model_type}, where)
    is_tied = fields.optional_flag("tie_word_embeddings")
    if is_tied is None:
        is_tied = model_type.startswith(_TIED_BY_DEFAULT)
    shapes: dict[str, tuple[int, ...]] = {} if is_tied else {HEAD: ()}
    found: ModelConfig = family.config_from_hf(HFSource(fields=fields, shapes=shapes))
    return found
