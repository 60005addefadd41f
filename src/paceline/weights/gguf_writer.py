"""GGUF files: the head of one, with metadata of values or carried over byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.weights.gguf import TYPE_OF_FORMAT
from paceline.weights.tensor import BLOCK

DEFAULT_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_VERSION = 3
# general.file_type, which says what most tensors are in.
_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 15,
    "q5_k": 17, "q6_k": 18,
}  # fmt: skip

Entry = tuple[str, str, tuple[int, ...]]  # name, format, shape with the outermost extent first


def metadata_of(raw: Mapping[str, npt.NDArray[np.uint8]], fmt: str | None) -> dict[str, bytes]:
    """Return the entries of another file for one of `fmt`, in one part; None: no tensors' format.

    `raw` are the entries' bytes, type first (`GGUF.raw`).
    """
    entries = {key: value.tobytes() for key, value in raw.items() if not key.startswith("split.")}
    if fmt is not None:
        entries["general.file_type"] = struct.pack("<II", _U32, _FILE_TYPES[fmt])
        entries["general.quantization_version"] = struct.pack("<II", _U32, 2)
    return entries


def gguf_head(
    metadata: Mapping[str, bytes], tensors: Sequence[Entry], *, alignment: int = DEFAULT_ALIGNMENT
) -> tuple[bytes, list[int]]:
    """Return a file's bytes before its data, padded, and the padded size of each tensor.

    Tensors follow one another in their order. `alignment` is what general.alignment says.
    """
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), value]
    sizes: list[int] = []
    offset = 0
    for name, fmt, shape in tensors:
        weights, block_bytes = BLOCK[fmt]
        num_bytes = int(np.prod(shape, dtype=np.int64)) // weights * block_bytes
        parts.append(_string(name) + struct.pack("<I", len(shape)))
        parts.append(struct.pack(f"<{len(shape)}Q", *shape[::-1]))
        parts.append(struct.pack("<IQ", TYPE_OF_FORMAT[fmt], offset))
        sizes.append(-(-num_bytes // alignment) * alignment)
        offset += sizes[-1]
    head = b"".join(parts)
    return head + bytes(-len(head) % alignment), sizes


def encoded_value(value: Any) -> bytes:
    """Return a metadata value as a file has it, its type first.

    Numbers become u32 and f32, arrays i32, f32 or bool, lists strings.
    """
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = {"int32": _I32, "float32": _F32, "bool": _BOOL}[value.dtype.name]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
