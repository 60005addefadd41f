"""Packing, its bounds, and the disk cache of packed weights."""

from __future__ import annotations

import errno
import io
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paceline import _native
from paceline.errors import ModelFormatError
from paceline.weights import repack
from paceline.weights.huge_file import HUGE_BYTES, HugeWriter, map_file
from paceline.weights.repack import PackedTensor, pack_all, pack_tensor, packed_bytes
from paceline.weights.tensor import BLOCK, QTensor
from tests.tiny import random_blocks

FORMATS = sorted(BLOCK)
# Rows of real models, in the formats' own multiples.
COLUMNS = {1: (576, 896), 32: (576, 896, 4864), 256: (1536, 4864, 8960)}


def tensor_of(fmt: str, rows: int, k: int, seed: int = 0) -> QTensor:
    weights, size = BLOCK[fmt]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, k // weights * size), dtype=np.uint8)
    return QTensor(fmt, (rows, k), data)


class Counted(Mapping[str, QTensor]):
    """Tensors that count how often they are read."""

    def __init__(self, tensors: dict[str, QTensor]) -> None:
        self.tensors = tensors
        self.reads = 0

    def __getitem__(self, name: str) -> QTensor:
        self.reads += 1
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.fixture
def tensors() -> Counted:
    rng = np.random.default_rng(0)
    return Counted(
        {
            "a": random_blocks(rng, "q4_1", (40, 96)),
            "b": random_blocks(rng, "q6_k", (16, 256)),
            "c": random_blocks(rng, "f16", (3, 7)),
        }
    )


def pack(
    tensors: Mapping[str, QTensor], cache: Path | None, fingerprint: str = "1"
) -> dict[str, PackedTensor]:
    return pack_all(
        tensors, list(tensors), cache_path=cache, fingerprint=fingerprint, num_threads=2
    )


def assert_same(a: dict[str, PackedTensor], b: dict[str, PackedTensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        other = b[name]
        assert (tensor.format, tensor.rows, tensor.k) == (other.format, other.rows, other.k)
        assert np.array_equal(tensor.data, other.data)
        assert tensor.data.ctypes.data % 64 == other.data.ctypes.data % 64 == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_weights_take_at_most_two_percent_more_bytes(fmt: str) -> None:
    weights, size = BLOCK[fmt]
    for k in COLUMNS[weights]:
        source = 16 * (k // weights) * size
        assert source <= packed_bytes(fmt, 16, k) <= 1.02 * source


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_and_row_order_move_rows_and_nothing_else(fmt: str) -> None:
    k = BLOCK[fmt][0] * 3
    tensor = tensor_of(fmt, 21, k)
    order = np.random.default_rng(1).permutation(21).astype(np.int32)
    moved = pack_tensor(replace(tensor, row_order=order), num_threads=2)
    plain = pack_tensor(QTensor(fmt, tensor.shape, tensor.data[order]))
    assert np.array_equal(moved.data, plain.data)
    assert not np.array_equal(moved.data, pack_tensor(tensor).data)


def test_padding_rows_are_zeros_whatever_memory_held() -> None:
    tensor = tensor_of("q8_0", 1, 32)
    packed = pack_tensor(tensor)
    blocks = packed.data[:512].reshape(8, 16, 4)
    assert np.array_equal(blocks[:, 0], tensor.data[0, 2:].reshape(8, 4))
    assert not blocks[:, 1:].any()
    assert not packed.data[514:].any()


def native_pack(*, src: Any, k: Any, dst: Any, order: Any = None, panels: Any = (0, 1)) -> None:
    _native.pack("q8_0", src, k, order, dst, *panels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 33}, "multiple of 32"),
        ({"k": 64}, "take 68 bytes, got 34"),
        ({"dst": np.zeros(575, np.uint8)}, "takes 576 bytes, dst has 575"),
        ({"panels": (0, 2)}, "outside 0 to 1"),
        ({"order": np.array([0, 9], np.int32)}, r"row_order\[1\] = 9"),
        ({"order": np.array([0], np.int32)}, "1 entries for 2 rows"),
    ],
)
def test_native_pack_refuses_sizes_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {
        "src": np.zeros((2, 34), np.uint8),
        "k": 32,
        "dst": np.zeros(576, np.uint8),
    }
    native_pack(**args)
    with pytest.raises(ValueError, match=message):
        native_pack(**(args | change))


def test_native_linear_refuses_a_weight_that_is_too_small() -> None:
    packed = pack_tensor(tensor_of("q8_0", 17, 32))
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="takes 1728 bytes, got 1152"):
        _native.linear("scalar", x, [("q8_0", packed.data, 33, 32, None)])
    with pytest.raises(ValueError, match="unknown weight format 'q9'"):
        _native.linear("scalar", x, [("q9", packed.data, 17, 32, None)])


def test_a_tensor_that_is_no_matrix_of_whole_blocks_is_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"shape \(32,\)"):
        pack_tensor(QTensor("q8_0", (32,), np.zeros(34, np.uint8)))
    with pytest.raises(ModelFormatError, match="multiple of 32"):
        pack_tensor(QTensor("q8_0", (1, 33), np.zeros((1, 34), np.uint8)))


def test_second_start_maps_the_cache_and_reads_no_tensor(tensors: Counted, tmp_path: Path) -> None:
    cache = tmp_path / "new folder" / "model.packed"
    first = pack(tensors, cache)
    tensors.reads = 0
    assert_same(pack(tensors, cache), first)
    assert tensors.reads == 0
    assert_same(first, pack(tensors, None))
    assert [p.name for p in cache.parent.iterdir()] == ["model.packed"]


def test_cache_of_another_source_or_version_is_rewritten(
    tensors: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "model.packed"
    pack(tensors, cache)
    tensors.reads = 0
    pack(tensors, cache, fingerprint="2")
    assert tensors.reads == 3
    monkeypatch.setattr(repack, "PACK_VERSION", repack.PACK_VERSION + 1)
    pack(tensors, cache, fingerprint="2")
    pack(tensors, cache, fingerprint="2")
    assert tensors.reads == 6


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_truncated_cache_is_rewritten(tensors: Counted, tmp_path: Path, cut: int) -> None:
    cache = tmp_path / "model.packed"
    first = pack(tensors, cache)
    whole = cache.read_bytes()
    cache.write_bytes(whole[:cut])
    assert_same(pack(tensors, cache), first)
    assert cache.read_bytes() == whole


def test_cache_with_a_flipped_bit_in_head_or_index_is_rewritten(
    tensors: Counted, tmp_path: Path
) -> None:
    cache = tmp_path / "model.packed"
    first = pack(tensors, cache)
    whole = cache.read_bytes()
    for at in (*range(0, 64, 5), *range(len(whole) - 40, len(whole), 7)):
        broken = bytearray(whole)
        broken[at] ^= 4
        cache.write_bytes(broken)
        assert_same(pack(tensors, cache), first)
        assert cache.read_bytes() == whole


def test_folder_that_cannot_be_written_costs_one_warning(
    tensors: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with caplog.at_level(logging.WARNING):
        assert_same(pack(tensors, blocker / "model.packed"), pack(tensors, None))
    assert len(caplog.records) == 1
    assert "cannot keep packed weights" in caplog.text


class FullDisk(io.FileIO):
    """Takes the head of a cache and then has no space left."""

    def write(self, data: Any, /) -> int:
        if len(memoryview(data)) > 64:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_full_disk_costs_one_warning_and_leaves_no_file(
    tensors: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = repack._CacheWriter(tmp_path / "model.packed", FullDisk(tmp_path / "temporary", "w"))
    packed = pack_tensor(tensors["a"])
    with caplog.at_level(logging.WARNING):
        writer.add("a", packed)
        writer.add("b", packed)
        writer.finish("1")
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


class Recording(io.FileIO):
    """Notes where it is written, and takes a part of what it gets."""

    def write(self, data: Any, /) -> int:
        self.pieces = [*getattr(self, "pieces", []), (self.tell(), len(data))]
        return super().write(memoryview(data)[: HUGE_BYTES // 2 + 5])


def test_a_cache_is_written_in_huge_pieces_at_multiples_of_their_size(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    data = np.arange(5 * HUGE_BYTES + 777, dtype=np.uint32).view(np.uint8)[: 5 * HUGE_BYTES + 777]
    file = Recording(path, "w")
    writer = HugeWriter(file)
    parts = (13, HUGE_BYTES - 13, 3 * HUGE_BYTES + 1, 50)
    ends = np.cumsum([*parts, len(data) - sum(parts)])
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        writer.write(data[begin:end].data)
        assert writer.position == end
    writer.finish()
    begins = [piece for piece in file.pieces if piece[0] % HUGE_BYTES == 0]
    assert [at for at, _ in begins] == list(range(0, len(data), HUGE_BYTES))
    assert [size for _, size in begins[:-1]] == [HUGE_BYTES] * 5
    file.close()
    assert np.array_equal(map_file(path), data)


def test_progress_counts_tensors(tensors: Counted) -> None:
    seen: list[tuple[int, int]] = []
    pack_all(
        tensors, list(tensors), cache_path=None, num_threads=1, progress=lambda *n: seen.append(n)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_tensors_of_a_mapped_file_survive_dropping_their_pages(tmp_path: Path) -> None:
    tensor = tensor_of("q8_0", 512, 320)
    path = tmp_path / "source"
    path.write_bytes(tensor.data.tobytes())
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    view = QTensor("q8_0", tensor.shape, mapped.reshape(512, -1))
    assert_same(pack({"w": view}, None), pack({"w": tensor}, None))
    assert np.array_equal(view.data, tensor.data)


def test_fingerprint_changes_with_size_time_and_head(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    seen = {repack.source_fingerprint([path])}
    os.utime(path, ns=(1, 1))
    seen.add(repack.source_fingerprint([path]))
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    seen.add(repack.source_fingerprint([path]))
    path.write_bytes(b"twos")
    os.utime(path, ns=(1, 1))
    seen.add(repack.source_fingerprint([path]))
    assert len(seen) == 4


def test_weights_that_are_no_numbers_are_reported_at_every_start(
    tensors: Counted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors["b"].data[3, 208:210] = np.array([np.nan], "<f2").view(np.uint8)
    for _ in range(2):
        pack(tensors, tmp_path / "model.packed")
    assert caplog.text.count("NaN or infinity in the weights b:") == 2
    assert not list(tmp_path.iterdir())
