"""Reader of a Hugging Face folder: safetensors shards and the JSON files beside them.

Each shard is mapped and its header bounded by the file's size. Format: 8 bytes of header length, a
JSON header {name: {dtype, shape, data_offsets}}, then the data. A tensor that `paceline quantize`
made is U8 rows of blocks; the header's metadata names its format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from paceline.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from paceline.weights.mapped_file import map_file
from paceline.weights.tensor import BLOCK, StoredTensor

MAX_HEADER_BYTES = 100 << 20  # the reference implementation's own limit
MAX_JSON_BYTES = 200 << 20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FORMATS_KEY = "paceline.formats"  # of __metadata__: JSON, name of a U8 tensor -> its format
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class HFFolder(Struct, frozen=True):
    """An open folder. JSON files that are absent are {}; `tokenizer_json` is then b""."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer_json: bytes
    tokenizer_config: dict[str, Any]
    chat_template_file: str | None
    tensors: dict[str, StoredTensor]


def open_folder(path: Path) -> HFFolder:
    """Open a folder with config.json and model.safetensors or an index of shards.

    Raises ModelFormatError, naming the file, if anything is broken, cut or missing.
    """
    if not (path / "config.json").exists():
        raise ModelNotFoundError(f"{path} has no config.json: it is no model folder")
    template = path / "chat_template.jinja"
    tokenizer = path / "tokenizer.json"
    return HFFolder(
        path=path,
        config=_read_object(path / "config.json"),
        generation=_read_object(path / "generation_config.json"),
        tokenizer_json=_read_bytes(tokenizer) if tokenizer.exists() else b"",
        tokenizer_config=_read_object(path / "tokenizer_config.json"),
        chat_template_file=(
            _read_bytes(template).decode("utf-8", "replace") if template.exists() else None
        ),
        tensors=_open_tensors(path),
    )


def _read_bytes(path: Path) -> bytes:
    data = map_file(path)
    if len(data) > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path} has {len(data)} bytes: the limit is {MAX_JSON_BYTES}")
    return data.tobytes()


def _parse_object(path: Path, raw: bytes, what: str = "") -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: {what}broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: {what}a JSON object is expected")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    return _parse_object(path, _read_bytes(path)) if path.exists() else {}


def _open_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors; with an index, each from the shard that the index names, strays left out."""
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise ModelFormatError(
                f"{path} has neither {SINGLE} nor {INDEX}: the weights are missing"
            )
        return open_safetensors(path / SINGLE)
    weight_map = _read_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path / INDEX}: weight_map is missing")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted({str(name) for name in weight_map.values()}):
        if Path(shard).name != shard:
            raise ModelFormatError(f"{path / INDEX}: {shard!r} is no file name")
        if not (path / shard).exists():
            raise ModelFormatError(f"{path / shard} is missing: {INDEX} lists it, download it")
        shards[shard] = open_safetensors(path / shard)
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[str(shard)]:
            raise ModelFormatError(
                f"{path / str(shard)} has no tensor {name!r}, which {INDEX} says it has"
            )
        tensors[name] = shards[str(shard)][name]
    return tensors


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, as views of it."""
    data = map_file(path)
    if len(data) < 8:
        raise ModelFormatError(f"{path} has {len(data)} bytes: even the header needs more")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelFormatError(
            f"{path}: the header takes {length} bytes, the file has {len(data)}: "
            "it is cut or no safetensors file"
        )
    header = _parse_object(path, data[8 : 8 + length].tobytes(), "header: ")
    formats = _block_formats(path, header.pop("__metadata__", None))
    spans = {name: _span(path, name, entry, formats.get(name)) for name, entry in header.items()}
    end = max((stop for _, _, _, stop in spans.values()), default=0)
    base = 8 + length
    if base + end > len(data):
        raise ModelFormatError(
            f"{path} is cut: it has {len(data)} bytes, its header describes {base + end}: "
            "download it again"
        )
    _refuse_overlaps(path, spans)
    tensors = {}
    for name, (fmt, shape, start, stop) in spans.items():
        tensors[name] = StoredTensor(name, fmt, shape, data[base + start : base + stop])
    return tensors


def _block_formats(path: Path, metadata: Any) -> dict[str, str]:
    """Formats of the quantised tensors; {} in files that others made."""
    if not isinstance(metadata, dict) or FORMATS_KEY not in metadata:
        return {}
    formats = _parse_object(path, str(metadata[FORMATS_KEY]).encode(), f"{FORMATS_KEY}: ")
    unknown = [fmt for fmt in formats.values() if not isinstance(fmt, str) or fmt not in BLOCK]
    if unknown:
        raise UnsupportedModelError(
            f"{path} holds weights in {str(unknown[0])[:40]!r}, which this version cannot read: "
            "upgrade paceline or quantise the model again"
        )
    return formats


def _span(
    path: Path, name: str, entry: Any, blocks: str | None
) -> tuple[str, tuple[int, ...], int, int]:
    """(format, shape, begin, end) of a header entry; `blocks` is the format of a quantised one."""
    where = f"{path}: tensor {name!r}"
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, start, stop]
    except (TypeError, KeyError, ValueError):
        raise ModelFormatError(f"{where} needs dtype, shape and data_offsets") from None
    if (
        not isinstance(dtype, str)
        or dtype in BLOCK
        or any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 1 << 62 for n in sizes)
    ):
        raise ModelFormatError(f"{where} has the impossible entry {str(entry)[:120]}")
    if blocks is not None:
        return blocks, _shape_of_blocks(where, blocks, dtype, shape, stop - start), start, stop
    fmt = _FORMATS.get(dtype, dtype)
    if fmt in BLOCK:
        expected = math.prod(shape) * BLOCK[fmt][1]
        if expected == 0 or stop - start != expected:
            raise ModelFormatError(
                f"{where}: {dtype} {shape} takes {expected} bytes, its offsets span {stop - start}"
            )
    return fmt, tuple(shape), start, stop


def _shape_of_blocks(
    where: str, fmt: str, dtype: str, shape: list[int], num_bytes: int
) -> tuple[int, ...]:
    """Shape of the weight whose rows of blocks are U8 of `shape`."""
    weights, block_bytes = BLOCK[fmt]
    if dtype != "U8" or not shape or shape[-1] % block_bytes or math.prod(shape) != num_bytes:
        raise ModelFormatError(
            f"{where}: {dtype} {shape} in {num_bytes} bytes cannot be blocks of {fmt}, "
            f"{block_bytes} bytes each"
        )
    if num_bytes == 0:
        raise ModelFormatError(f"{where} is empty")
    return (*shape[:-1], shape[-1] // block_bytes * weights)


def _refuse_overlaps(
    path: Path, spans: Mapping[str, tuple[str, tuple[int, ...], int, int]]
) -> None:
    ordered = sorted((start, stop, name) for name, (_, _, start, stop) in spans.items())
    for (_, stop, name), (start, _, other) in pairwise(ordered):
        if start < stop:
            raise ModelFormatError(f"{path}: tensors {name!r} and {other!r} overlap")
