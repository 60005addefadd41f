"""Read bandwidth of the machine, and the share of it that decoding reached."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.models.base import ModelConfig
from paceline.weights.tensor import QTensor

_BUFFER_BYTES = 256 * 2**20  # what two cores' last-level caches hold is little of it
_SECONDS = 0.03
EMBEDDING = "model.embed_tokens.weight"


def read_bandwidth(num_threads: int) -> float:
    """Return the bytes a second that `num_threads` threads read from memory (takes about 0.2 s)."""
    from paceline import _native

    return float(_native.read_bandwidth(_BUFFER_BYTES, num_threads, _SECONDS))


def decode_weight_bytes(model: ModelConfig, tensors: Mapping[str, QTensor]) -> int:
    """Return the weight bytes that one decode step reads: all but an untied embedding table.

    An embedding step reads one row of its table; a tied table is read whole, as the head.
    """
    total = sum(tensor.num_bytes for tensor in tensors.values())
    if EMBEDDING in tensors and not model.tie_embeddings:
        total -= tensors[EMBEDDING].num_bytes
    return total


def bandwidth_fraction(
    *, weight_bytes: int, kv_bytes: float, seconds_per_step: float, peak_bytes_per_s: float
) -> float:
    """Return the share of the peak that a decode step reached, which reads weights and KV once."""
    return (weight_bytes + kv_bytes) / seconds_per_step / peak_bytes_per_s
