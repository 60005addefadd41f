"""GGUF reader: maps the file, and bounds every count by the file's size before it allocates.

Versions 2 and 3, little endian. Opening a 1 GB file takes milliseconds: numeric arrays are views,
strings of arrays are decoded when asked for. Format: ggml/docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline import _native
from paceline.errors import ModelFormatError, UnsupportedModelError
from paceline.weights.mapped_file import map_file
from paceline.weights.tensor import BLOCK, StoredTensor

MAX_ENTRIES = 1 << 17  # metadata keys or tensors of a file: far more than any model has
MAX_NESTING = 4  # arrays of arrays
MAX_NESTED_ARRAYS = 1 << 12

_FORMATS = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k",
    11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 20: "iq4_nl", 30: "bf16",
}  # fmt: skip
TYPE_OF_FORMAT = {fmt: kind for kind, fmt in _FORMATS.items()}
_OTHER_FORMATS = {
    9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s",
    22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m",
    34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SHARD_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class StringArray(Sequence[str]):
    """Strings in the mapped file, decoded when asked for; bad UTF-8 becomes U+FFFD."""

    def __init__(self, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.offsets = offsets  # [n + 1] where each string's 8-byte length begins

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        start, end = int(self.offsets[i]) + 8, int(self.offsets[i + 1])
        return self.data[start:end].tobytes().decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(_native.gguf_strings(self.data, self.offsets))


class GGUF(Struct, frozen=True):
    """An open GGUF model, all shards together.

    Metadata values are int, float, bool, str, NumPy arrays, StringArray, or lists of those. `raw`
    has their bytes in the (first) file, each with its type before it.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    raw: dict[str, npt.NDArray[np.uint8]]
    tensors: dict[str, StoredTensor]


def open_gguf(path: Path) -> GGUF:
    """Open a GGUF file, or all shards of a split one given any of them.

    Raises ModelFormatError, naming the file and the key or tensor, on anything broken or missing.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 100_000:
        raise ModelFormatError(f"{path}: split.count is {count!r}")
    return first if count == 1 else _join_shards(path, first, count)


def _join_shards(path: Path, given: GGUF, count: int) -> GGUF:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelFormatError(
            f"{path} is one of {count} parts but is not named NAME-00001-of-{count:05}.gguf: "
            "give the parts their own names back"
        )
    paths = tuple(path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise ModelFormatError(
            f"{path}: {len(missing)} of {count} parts missing: {', '.join(missing[:5])}"
        )
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, Any] = {}
    raw: dict[str, npt.NDArray[np.uint8]] = {}
    for i, part_path in enumerate(paths):
        part = given if part_path == path else _read_file(part_path)
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != count:
            raise ModelFormatError(f"{part_path} does not say that it is part {i + 1} of {count}")
        double = tensors.keys() & part.tensors.keys()
        if double:
            raise ModelFormatError(f"{part_path}: tensor {min(double)!r} is in another part too")
        tensors |= part.tensors
        metadata, raw = metadata or part.metadata, raw or part.raw
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelFormatError(f"{path}: the parts hold {len(tensors)} tensors, not {total}")
    return GGUF(paths, metadata, raw, tensors)


class _Cursor:
    """Reads forward through the mapped file; every read is checked against its end."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.what = "the header"  # what is being read, for messages
        self.nested_arrays = 0

    def fail(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {self.what} {problem}")

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        end = self.at + size
        if end > len(self.data):
            raise self.fail(
                f"needs bytes up to {end}, the file has {len(self.data)}: "
                "it is cut or broken, download it again"
            )
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def unpack(self, code: str) -> Any:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)).tobytes())
        return value

    def u32(self) -> int:
        return int(self.unpack("<I"))

    def u64(self) -> int:
        return int(self.unpack("<Q"))

    def count(self, smallest: int) -> int:
        """A count of items of at least `smallest` bytes that follow."""
        value = self.u64()
        left = len(self.data) - self.at
        if value * smallest > left:
            raise self.fail(f"counts {value} items, but only {left} bytes follow")
        return value

    def string(self) -> bytes:
        return self.take(self.count(1)).tobytes()

    def name(self, what: str, limit: int) -> str:
        raw = self.string()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"has a {what} that is not UTF-8: {raw[:40]!r}") from None
        if not text or len(raw) > limit:
            raise self.fail(f"has a {what} of {len(raw)} bytes, the limit is {limit}")
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind])
            return self.take(dtype.itemsize).view(dtype)[0].item()
        if kind == _BOOL:
            byte = int(self.take(1)[0])
            if byte > 1:
                raise self.fail(f"is a bool with the value {byte}")
            return bool(byte)
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.array(depth)
        raise self.fail(f"has the unknown value type {kind}")

    def array(self, depth: int) -> Any:
        kind = self.u32()
        if kind in _NUMBERS or kind == _BOOL:
            dtype = np.dtype(_NUMBERS.get(kind, "<u1"))
            array = self.take(self.count(dtype.itemsize) * dtype.itemsize).view(dtype)
            if kind == _BOOL and array.max(initial=0) > 1:
                raise self.fail("holds a bool above 1")
            return array.view(np.bool_) if kind == _BOOL else array
        if kind == _STRING:
            return self.string_array()
        if kind != _ARRAY:
            raise self.fail(f"has the unknown element type {kind}")
        count = self.count(12)
        self.nested_arrays += count
        if depth + 1 >= MAX_NESTING or self.nested_arrays > MAX_NESTED_ARRAYS:
            raise self.fail(f"nests arrays {depth + 2} deep or more than {MAX_NESTED_ARRAYS} times")
        return [self.array(depth + 1) for _ in range(count)]

    def string_array(self) -> StringArray:
        count = self.count(8)
        try:
            offsets = _native.gguf_string_offsets(self.data, self.at, count)
        except ValueError as error:
            raise self.fail(f"is broken: {error}") from None
        self.at = int(offsets[-1])
        return StringArray(self.data, offsets)


def _read_file(path: Path) -> GGUF:
    cursor = _Cursor(path, map_file(path))
    num_tensors, num_keys = _read_header(cursor)
    metadata: dict[str, Any] = {}
    raw: dict[str, npt.NDArray[np.uint8]] = {}
    for i in range(num_keys):
        cursor.what = f"metadata entry {i + 1} of {num_keys}"
        key = cursor.name("key", 65535)
        if key in metadata:
            raise cursor.fail(f"repeats the key {key!r}")
        cursor.what = f"key {key!r}"
        start = cursor.at
        metadata[key] = cursor.value(cursor.u32())
        raw[key] = cursor.data[start : cursor.at]
    tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, metadata))
    return GGUF((path,), metadata, raw, tensors)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Return (tensors, metadata keys)."""
    magic = cursor.data[:4].tobytes()
    if magic != b"GGUF":
        raise ModelFormatError(f"{cursor.path} is no GGUF file: it begins with {magic!r}")
    cursor.at = 4
    version = cursor.u32()
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModelError(f"{cursor.path} is big endian: convert it to little endian")
    if version not in (2, 3):
        raise UnsupportedModelError(
            f"{cursor.path} is GGUF version {version}: 2 and 3 are supported"
        )
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    left = len(cursor.data) - cursor.at
    # The least a tensor takes is 24 bytes, the least a key takes 13.
    if max(num_tensors, num_keys) > MAX_ENTRIES or 24 * num_tensors + 13 * num_keys > left:
        raise cursor.fail(
            f"announces {num_tensors} tensors and {num_keys} keys, but only {left} bytes follow"
        )
    return num_tensors, num_keys


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 1 <= value <= 1 << 20 or value & (value - 1):
        raise ModelFormatError(
            f"{cursor.path}: general.alignment is {value!r}: it must be a power of two"
        )
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for i in range(count):
        cursor.what = f"tensor {i + 1} of {count}"
        name = cursor.name("name", 1024)
        if name in entries:
            raise cursor.fail(f"repeats the name {name!r}")
        cursor.what = f"tensor {name!r}"
        num_dims = cursor.u32()
        if not 1 <= num_dims <= 4:
            raise cursor.fail(f"has {num_dims} dimensions: 1 to 4 are allowed")
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
        kind, offset = cursor.u32(), cursor.u64()
        if kind not in _FORMATS and kind not in _OTHER_FORMATS:
            raise cursor.fail(f"has the unknown type {kind}")
        if offset % alignment:
            raise cursor.fail(f"starts at offset {offset}, no multiple of {alignment}")
        entries[name] = (_FORMATS.get(kind) or _OTHER_FORMATS[kind], shape, offset)
    base = -(-cursor.at // alignment) * alignment
    return _place_tensors(cursor, entries, base)


def _place_tensors(
    cursor: _Cursor, entries: dict[str, tuple[str, tuple[int, ...], int]], base: int
) -> dict[str, StoredTensor]:
    """Check that each tensor lies inside the file and clear of the others."""
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, (fmt, shape, offset) in entries.items():
        cursor.what = f"tensor {name!r}"
        if fmt not in BLOCK:
            tensors[name] = StoredTensor(name, fmt, shape, None)
            continue
        weights, block_bytes = BLOCK[fmt]
        size = block_bytes
        for extent in shape:
            size *= extent
        if size == 0 or shape[-1] % weights:
            raise cursor.fail(f"has the shape {list(shape)}, which {fmt} cannot have")
        size //= weights
        cursor.at = base + offset
        tensors[name] = StoredTensor(name, fmt, shape, cursor.take(size))
        spans.append((cursor.at - size, cursor.at, name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ModelFormatError(f"{cursor.path}: tensors {name!r} and {other!r} overlap")
    return tensors
