"""The head of a safetensors file. Quantised tensors are U8, the formats stand in its metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np

from paceline.weights.gguf_writer import Entry
from paceline.weights.safetensors import FORMATS_KEY
from paceline.weights.tensor import BLOCK

_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def safetensors_head(tensors: Sequence[Entry]) -> tuple[bytes, list[int]]:
    """Return a file's bytes before its data, and the size of each tensor, which follow in order."""
    header: dict[str, object] = {}
    formats: dict[str, str] = {}
    sizes: list[int] = []
    offset = 0
    for name, fmt, shape in tensors:
        weights, block_bytes = BLOCK[fmt]
        row_bytes = shape[-1] // weights * block_bytes
        stored = shape if fmt in _DTYPES else (*shape[:-1], row_bytes)
        if fmt not in _DTYPES:
            formats[name] = fmt
        sizes.append(int(np.prod(shape[:-1], dtype=np.int64)) * row_bytes)
        end = offset + sizes[-1]
        header[name] = {
            "dtype": _DTYPES.get(fmt, "U8"), "shape": list(stored), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    header = {"__metadata__": {"format": "pt", FORMATS_KEY: json.dumps(formats)}, **header}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, sizes
