"""Rounding float weights to a quantised format as they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from paceline.errors import ModelFormatError
from paceline.weights.tensor import BLOCK, QTensor, dequantize

_GROUP = BLOCK["q8_0"][0]
_MAX_F16 = 65504.0


def to_q8_0(tensor: QTensor) -> QTensor:
    """Return a matrix in int8 with one f16 scale, max|w| / 127, for each 32 columns."""
    rows, cols = tensor.shape
    if cols % _GROUP:
        raise ModelFormatError(
            f"a weight of {cols} columns cannot be rounded to q8_0, whose groups have {_GROUP}: "
            "leave its weights as they are"
        )
    groups = dequantize(tensor).reshape(rows, -1, _GROUP)
    wanted = np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)
    scale = np.minimum(wanted, np.float32(_MAX_F16)).astype("<f2")
    inverse = np.divide(1, scale, out=np.zeros_like(wanted), where=scale > 0, dtype=np.float32)
    quants = np.clip(np.rint(groups * inverse), -127, 127).astype(np.int8)
    blocks = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=2)
    return QTensor("q8_0", tensor.shape, np.ascontiguousarray(blocks.reshape(rows, -1)))


def with_q8_0(tensors: Mapping[str, QTensor], names: Iterable[str]) -> dict[str, QTensor]:
    """Return `tensors` with those of `names` rounded to q8_0."""
    return {**tensors, **{name: to_q8_0(tensors[name]) for name in names}}
