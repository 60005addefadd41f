"""Packed weights: a source tensor's bytes in the order that the kernels read, and their disk cache.

The layout is `native/kernels/linear_layout.h`; it is the same for every instruction set.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline import _native
from paceline.errors import ModelFormatError
from paceline.weights.huge_file import HugeWriter, map_file
from paceline.weights.mapped_file import drop_pages
from paceline.weights.tensor import BLOCK, QTensor, is_finite

U8 = npt.NDArray[np.uint8]

PANEL = 16  # output rows of a panel
PACK_VERSION: int = _native.PACK_VERSION  # of the layout of packed panels
_ALIGN = 64
_POPULATE_BYTES = 1 << 32  # up to this size a cache is mapped ahead of the first step
_CHUNK_BYTES = 1 << 20  # of packed panels a thread takes at once
# A cache file: this head, the tensors (64-byte aligned), the index (JSON) up to the file's end.
_HEAD = struct.Struct("<16sQQ32s")  # magic, offset and size of the index, sha256 of the index
_MAGIC = b"paceline-packed\n"

_log = logging.getLogger(__name__)


class PackedTensor(Struct, frozen=True):
    """A weight of `rows` outputs and `k` inputs in panels; `data` is uint8, 64-byte aligned."""

    format: str
    rows: int
    k: int
    data: U8


def packed_bytes(fmt: str, rows: int, k: int) -> int:
    """Bytes of a packed [rows, k] weight: the source's, with rows padded to a panel."""
    return -(-rows // PANEL) * int(_native.packed_panel_bytes(fmt, k))


def source_fingerprint(paths: Iterable[Path]) -> str:
    """Return a hash that changes when a file is replaced: name, size, mtime and first 64 KiB."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()


def pack_tensor(tensor: QTensor, *, num_threads: int = 1) -> PackedTensor:
    """Return the packed copy of a matrix; its columns stay in the order of its bytes."""
    with ThreadPoolExecutor(num_threads) as pool:
        return _pack(tensor.loaded(), pool)


def pack_all(
    tensors: Mapping[str, QTensor],
    names: Sequence[str],
    *,
    cache_path: Path | None,
    fingerprint: str = "",
    num_threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, PackedTensor]:
    """Return the packed `names`: mapped from the cache where it fits, else packed and cached.

    `fingerprint` identifies the source (`source_fingerprint`). The cache is only ever a help: one
    that is stale, cut or broken is rewritten, and one that cannot be written costs a log line.
    `progress(done, total)` is called after each tensor. Safe with several processes at once: each
    writes its own temporary file and renames it.
    """
    if cache_path is not None:
        cached = _read_cache(cache_path, names, fingerprint)
        if cached is not None:
            return cached
    packed: dict[str, PackedTensor] = {}
    broken: list[str] = []
    with _open_writer(cache_path) as writer, ThreadPoolExecutor(num_threads) as pool:
        for name in names:
            if name not in packed:
                tensor = tensors[name].loaded()
                if not is_finite(tensor):
                    broken.append(name)
                packed[name] = _pack(tensor, pool)
                writer.add(name, packed[name])
            if progress is not None:
                progress(len(packed), len(set(names)))
        if broken:
            warn_not_finite(broken)
        else:  # a cache would hide the warning from the next start
            writer.finish(fingerprint)
    return packed


def warn_not_finite(names: Sequence[str]) -> None:
    """Log that these weights hold NaN or infinity."""
    _log.warning(
        "NaN or infinity in the weights %s%s: requests that meet them end with an error; download "
        "or convert the model again",
        ", ".join(names[:3]),
        f" and {len(names) - 3} more" if len(names) > 3 else "",
    )


def _pack(tensor: QTensor, pool: ThreadPoolExecutor) -> PackedTensor:
    rows, k = _matrix_shape(tensor)
    panel_bytes = int(_native.packed_panel_bytes(tensor.format, k))
    panels = -(-rows // PANEL)
    out = _aligned_empty(panels * panel_bytes)
    src = np.ascontiguousarray(tensor.data.reshape(rows, -1))
    step = max(1, _CHUNK_BYTES // panel_bytes)
    jobs = [
        pool.submit(
            _native.pack, tensor.format, src, k, tensor.row_order, out, begin,
            min(begin + step, panels),
        )
        for begin in range(0, panels, step)
    ]  # fmt: skip
    for i, job in enumerate(jobs):
        job.result()
        if tensor.row_order is None:  # as it goes, or a large tensor would be resident twice
            drop_pages(src[i * step * PANEL : (i + 1) * step * PANEL])
    drop_pages(tensor.data)
    return PackedTensor(tensor.format, rows, k, out)


def _matrix_shape(tensor: QTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelFormatError(f"only a matrix can be packed, this weight has shape {tensor.shape}")
    rows, k = map(int, tensor.shape)
    block, block_bytes = BLOCK[tensor.format]
    if k % block or tensor.data.nbytes != rows * (k // block) * block_bytes:
        raise ModelFormatError(
            f"a {tensor.format} weight of shape {tensor.shape} has {tensor.data.nbytes} bytes; "
            f"rows must be a multiple of {block} values, {block_bytes} bytes each {block}"
        )
    return rows, k


def _aligned_empty(num_bytes: int) -> U8:
    raw = np.empty(num_bytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + num_bytes]


def _read_cache(
    path: Path, names: Sequence[str], fingerprint: str
) -> dict[str, PackedTensor] | None:
    """Return views of the mapped cache, or None where it does not serve these names."""
    try:
        mapped = map_file(path)
        index = _read_index(mapped)
        if index["version"] != PACK_VERSION or index["fingerprint"] != fingerprint:
            return None
        packed = {name: _view(mapped, index["tensors"][name]) for name in names}
        if mapped.nbytes <= _POPULATE_BYTES:
            _native.populate_pages(mapped)
        return packed
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def _read_index(mapped: U8) -> dict[str, Any]:
    magic, offset, size, checksum = _HEAD.unpack(mapped[: _HEAD.size].tobytes())
    if magic != _MAGIC or offset + size != len(mapped):
        raise ValueError("not a whole cache file")
    raw = mapped[offset : offset + size].tobytes()
    if hashlib.sha256(raw).digest() != checksum:
        raise ValueError("the index is broken")
    index = json.loads(raw)
    if not isinstance(index, dict):
        raise ValueError("the index is not an object")
    return index


def _view(mapped: U8, entry: list[Any]) -> PackedTensor:
    fmt, rows, k, offset = entry
    size = packed_bytes(fmt, rows, k)
    if rows <= 0 or offset % _ALIGN or not 0 <= offset <= len(mapped) - size:
        raise ValueError("a tensor lies outside the file")
    return PackedTensor(fmt, rows, k, mapped[offset : offset + size])


class _NoWriter:
    """Takes the place of a cache that is not wanted or cannot be written."""

    def add(self, name: str, tensor: PackedTensor) -> None: ...

    def finish(self, fingerprint: str) -> None: ...


class _CacheWriter(_NoWriter):
    """Writes a temporary file beside `path`, which takes its place in `finish`."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path = path
        self._file: FileIO | None = file
        self._writer = HugeWriter(file)
        self._tensors: dict[str, tuple[str, int, int, int]] = {}
        self._writer.write(bytes(_HEAD.size))

    def add(self, name: str, tensor: PackedTensor) -> None:
        if self._file is None:
            return
        try:
            self._writer.write(bytes(-self._writer.position % _ALIGN))
            self._tensors[name] = (tensor.format, tensor.rows, tensor.k, self._writer.position)
            self._writer.write(tensor.data.data)
        except OSError as error:
            self._give_up(error)

    def finish(self, fingerprint: str) -> None:
        if self._file is None:
            return
        index = json.dumps(
            {"version": PACK_VERSION, "fingerprint": fingerprint, "tensors": self._tensors}
        ).encode()
        try:
            offset = self._writer.position
            self._writer.write(index)
            self._writer.finish()
            checksum = hashlib.sha256(index).digest()
            os.pwrite(self._file.fileno(), _HEAD.pack(_MAGIC, offset, len(index), checksum), 0)
            os.replace(self._file.name, self._path)
        except OSError as error:
            self._give_up(error)
        else:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        _warn_unwritable(self._path, error)
        self.discard()

    def discard(self) -> None:
        """Remove the temporary file, if it has not become the cache."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)
        self._file = None


def _warn_unwritable(path: Path, error: OSError) -> None:
    reason = error.strerror or str(error)
    _log.warning(
        "cannot keep packed weights in %s (%s): starting this model will stay slower", path, reason
    )


@contextmanager
def _open_writer(path: Path | None) -> Iterator[_NoWriter]:
    if path is None:
        yield _NoWriter()
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: its files are for the owner alone, and a model may be shared.
        file = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp").open("xb", buffering=0)
    except OSError as error:
        _warn_unwritable(path, error)
        yield _NoWriter()
        return
    writer = _CacheWriter(path, file)
    try:
        yield writer
    finally:
        writer.discard()
