"""Formats of our own decoded the slow and plain way: the oracle where gguf has none."""

from __future__ import annotations

import re

import numpy as np

from paceline.weights.tensor import QTensor

_NAME = re.compile(r"(i4|i8|f8)(m?)_g(\d+)")


def is_own(fmt: str) -> bool:
    return _NAME.fullmatch(fmt) is not None


def decode(tensor: QTensor) -> np.ndarray:
    """float32 of `tensor.shape`; a block is d, maybe m, then its codes, 32 after 32."""
    match = _NAME.fullmatch(tensor.format)
    assert match is not None
    kind, has_min, group = match[1], bool(match[2]), int(match[3])
    head = 4 if has_min else 2
    size = head + (group // 2 if kind == "i4" else group)
    value = np.array([_value(kind, byte) for byte in range(256)], np.float32)
    rows = []
    for block in np.ascontiguousarray(tensor.data).reshape(-1, size):
        d = block[:2].view(np.float16).astype(np.float32)[0]
        codes = block[head:]
        if kind == "i4":
            runs = codes.reshape(-1, 16)  # 32 codes each: low nibbles, then high ones
            nibbles = np.concatenate([runs & 15, runs >> 4], axis=1).ravel().astype(np.float32)
            row = d * (nibbles if has_min else nibbles - 8)
        else:
            row = d * value[codes]
        rows.append(row + block[2:4].view(np.float16).astype(np.float32)[0] if has_min else row)
    return np.array(rows, np.float32).reshape(tensor.shape)


def _value(kind: str, byte: int) -> float:
    """What a byte of i8 or f8 stands for."""
    if kind != "f8":
        return byte - 256 if byte > 127 else byte
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    size = 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return sign * size
