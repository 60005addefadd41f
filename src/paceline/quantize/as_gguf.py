"""As GGUF: a folder of Hugging Face files as the GGUF file that says the same.

What GGUF has no word for is found by reading back: the config, the end tokens, and the ids and
texts of awkward samples must be those of the folder, or the folder is refused by what differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict

from paceline.errors import UnsupportedModelError
from paceline.loading import load
from paceline.models.base import ModelConfig, rope_frequencies, yarn_mscale
from paceline.plan.plan import RopeTable
from paceline.quantize.base import U8, RowsInOrder
from paceline.quantize.gguf_tokenizer import gguf_tokenizer, refuse_other_tokens
from paceline.weights.checkpoint import Checkpoint, checkpoint_of_gguf, text_name
from paceline.weights.fields import Fields
from paceline.weights.gguf import GGUF, TYPE_OF_FORMAT
from paceline.weights.gguf_writer import encoded_value
from paceline.weights.safetensors import HFFolder
from paceline.weights.tensor import QTensor, StoredTensor, dequantize, from_floats

_REMEDY = "name a folder with -o"
_TOLERANCE = 1e-6  # GGUF's numbers are f32


class ReorderedTensor(StoredTensor, frozen=True):
    """A matrix whose row i is row `order[i]` of the file."""

    order: npt.NDArray[np.int32]

    def load(self) -> QTensor:
        assert self.data is not None
        rows = RowsInOrder(self.data.reshape(self.shape[0], -1), self.order)
        return QTensor(self.format, self.shape, rows)


def as_gguf(folder: HFFolder, checkpoint: Checkpoint) -> tuple[GGUF, Checkpoint]:
    """Return the folder as an open GGUF, and the checkpoint that one reads from it.

    Raises UnsupportedModelError by the name of what GGUF cannot say. No matrix is read.
    """
    config = checkpoint.config
    family = load("models", config.family)
    if not config.is_causal:
        raise UnsupportedModelError(
            f"{folder.path} is of the family {config.family}, which is not written as GGUF: "
            f"{_REMEDY}"
        )
    [arch] = family.GGUF_ARCHITECTURES
    tensors = _tensors(folder, checkpoint, {v: k for k, v in family.GGUF_NAMES.items()})
    scaling = _scaling(folder)
    if scaling.text("rope_type", scaling.text("type", "default")) == "llama3":
        table = np.array(config.rope[0].inv_freq)
        divisors = rope_frequencies(config.head_dim, _theta(folder, scaling)) / table
        tensors["rope_freqs.weight"] = _stored("rope_freqs.weight", from_floats(divisors))
    metadata: dict[str, Any] = {
        "general.architecture": arch, "general.name": checkpoint.name,
        **{f"{arch}.{key}": value for key, value in _numbers(folder, config, scaling).items()},
        **gguf_tokenizer(checkpoint, str(folder.path)),
        **_generation(checkpoint),
    }  # fmt: skip
    for name, template in checkpoint.chat_templates.items():
        suffix = "" if name == "default" else f".{name}"
        metadata[f"tokenizer.chat_template{suffix}"] = template
    raw = {k: np.frombuffer(encoded_value(v), np.uint8) for k, v in metadata.items()}
    paths = tuple(sorted(folder.path.glob("*.safetensors")))
    file = GGUF(paths, metadata, raw, tensors)
    again = checkpoint_of_gguf(file, folder.path)
    _refuse_other_config(folder.path, config, again.config)
    refuse_other_tokens(checkpoint, again, str(folder.path))
    return file, again


def _tensors(
    folder: HFFolder, checkpoint: Checkpoint, parts: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Tensors under GGUF's names, in its order of rows, and vectors in f32."""
    family, config = load("models", checkpoint.config.family), checkpoint.config
    stored = {text_name(name): tensor for name, tensor in folder.tensors.items()}
    tensors: dict[str, StoredTensor] = {}
    for canonical in checkpoint.tensors:
        tensor, name = stored[canonical], _gguf_name(canonical, parts)
        if tensor.format not in TYPE_OF_FORMAT:
            raise UnsupportedModelError(
                f"{folder.path}: tensor {tensor.name} is in {tensor.format}, which a GGUF file "
                f"cannot hold: begin with the float model, or {_REMEDY}"
            )
        if len(tensor.shape) == 1:
            tensors[name] = _stored(name, from_floats(dequantize(checkpoint.tensors[canonical])))
        elif family.INTERLEAVED_ROPE and canonical.endswith(("q_proj.weight", "k_proj.weight")):
            rows = np.arange(tensor.shape[0], dtype=np.int32)
            order = rows.reshape(-1, 2, config.head_dim // 2).swapaxes(1, 2).ravel()
            tensors[name] = ReorderedTensor(name, tensor.format, tensor.shape, tensor.data, order)
        else:
            tensors[name] = StoredTensor(name, tensor.format, tensor.shape, tensor.data)
    return tensors


def _stored(name: str, tensor: QTensor) -> StoredTensor:
    data: U8 = tensor.data
    return StoredTensor(name, tensor.format, tensor.shape, data)


def _gguf_name(name: str, parts: Mapping[str, str]) -> str:
    """Return "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight"."""
    body, _, suffix = name.rpartition(".")
    prefix = ""
    if body.startswith("model.layers."):
        _, _, layer, body = body.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{parts[body]}.{suffix}"


# ---- numbers ----


def _text_fields(folder: HFFolder) -> Fields:
    return Fields(
        {**folder.config, **(folder.config.get("text_config") or {})},
        str(folder.path / "config.json"),
    )


def _scaling(folder: HFFolder) -> Fields:
    fields = _text_fields(folder)
    return fields.table("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _theta(folder: HFFolder, scaling: Fields) -> float:
    return scaling.number("rope_theta", _text_fields(folder).number("rope_theta", 10000.0))


def _numbers(folder: HFFolder, config: ModelConfig, scaling: Fields) -> dict[str, Any]:
    """The keys below the architecture's name."""
    numbers: dict[str, Any] = {
        "vocab_size": config.vocab_size, "context_length": config.max_context,
        "embedding_length": config.hidden_size, "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads, "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": _f32(config.norm_eps),
        "rope.dimension_count": config.head_dim,
    }  # fmt: skip
    if any(config.window):
        numbers["attention.sliding_window"] = max(config.window)
    if config.family == "gemma3":
        windowed = np.array([w > 0 for w in config.window])
        if not windowed.any():
            raise UnsupportedModelError(
                f"{folder.path}: a gemma3 without windowed layers is not written as GGUF: {_REMEDY}"
            )
        is_sixth = np.arange(1, config.num_layers + 1) % 6 == 0
        if not np.array_equal(windowed, ~is_sixth):
            numbers["attention.sliding_window_pattern"] = windowed
        local = config.rope[int(windowed.argmax())]
        numbers["rope.freq_base_swa"] = _f32(_base(local, config.head_dim))
        table = config.rope[int(windowed.argmin())]  # of a global layer, if there is one
        return numbers | _rope(table, config, "default", scaling, theta=0.0)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    return numbers | _rope(config.rope[0], config, kind, scaling, _theta(folder, scaling))


def _rope(
    table: RopeTable, config: ModelConfig, kind: str, scaling: Fields, theta: float
) -> dict[str, Any]:
    """The keys of a rope table; those of default and linear ones follow from its frequencies."""
    if kind == "llama3":  # the rest is in the tensor rope_freqs
        return {"rope.freq_base": _f32(theta)}
    if kind == "yarn":
        factor = scaling.number("factor")
        context = scaling.integer("original_max_position_embeddings", config.max_context)
        numbers = {
            "rope.freq_base": _f32(theta), "rope.scaling.type": "yarn",
            "rope.scaling.factor": _f32(factor), "rope.scaling.original_context_length": context,
            "rope.scaling.yarn_beta_fast": _f32(scaling.number("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": _f32(scaling.number("beta_slow", 1.0)),
        }  # fmt: skip
        weight = table.mscale / yarn_mscale(factor)
        if not math.isclose(weight, 1.0, rel_tol=_TOLERANCE):
            numbers["rope.scaling.attn_factor"] = _f32(weight)
        return numbers
    numbers = {"rope.freq_base": _f32(_base(table, config.head_dim))}
    if table.inv_freq[0] != 1.0:
        numbers["rope.scaling.type"] = "linear"
        numbers["rope.scaling.factor"] = _f32(1 / table.inv_freq[0])
    return numbers


def _base(table: RopeTable, head_dim: int) -> float:
    """Theta of frequencies f * theta ** (-2i / head_dim)."""
    if len(table.inv_freq) < 2:
        return 10000.0
    return float((table.inv_freq[0] / table.inv_freq[1]) ** (head_dim / 2))


def _f32(value: float) -> float:
    return float(np.float32(value))


def _generation(checkpoint: Checkpoint) -> dict[str, Any]:
    generation = checkpoint.generation
    numbers: dict[str, Any] = {
        "general.sampling.temp": generation.temperature,
        "general.sampling.top_k": generation.top_k,
        "general.sampling.top_p": generation.top_p,
        "general.sampling.penalty_repeat": generation.repetition_penalty,
    }
    return {
        key: _f32(value) if isinstance(value, float) else value
        for key, value in numbers.items()
        if value is not None
    }


def _refuse_other_config(path: Path, config: ModelConfig, again: ModelConfig) -> None:
    """Raise for what a reader of the GGUF file would take to be something else."""
    other = asdict(again)
    for key, value in asdict(config).items():
        if not _is_close(value, other[key]):
            raise UnsupportedModelError(
                f"{path}: GGUF has no word for this model's {key} ({str(value)[:60]}; it would be "
                f"read as {str(other[key])[:60]}): {_REMEDY}"
            )


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, RopeTable) and isinstance(b, RopeTable):
        return _is_close(a.inv_freq, b.inv_freq) and _is_close(a.mscale, b.mscale)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_TOLERANCE)
    return bool(a == b)
