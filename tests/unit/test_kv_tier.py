"""Blocks on disk: what breaks them, who may write, and when they are worth it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.engine import kv_tier_disk
from paceline.engine.kv_tier import KVTier, open_tier
from paceline.engine.kv_tier_disk import DiskStore
from paceline.errors import ParameterError

BLOCK = 4096
TOKENS = bytes(range(64))


def open_store(path: Path, max_bytes: int = 2**20) -> DiskStore:
    store = DiskStore(path, max_bytes=max_bytes, block_bytes=BLOCK)
    store.settle()
    return store


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def put(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        assert store.put(key(number), TOKENS, block(number))
        store.settle()


def files(path: Path) -> list[Path]:
    return sorted(path.glob("??/*"))


def test_a_block_comes_back_as_it_was_also_in_another_process_later(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2)
    np.testing.assert_array_equal(store.get(key(1), TOKENS), block(1))
    store.close(5)
    again = open_store(tmp_path)
    for number in (1, 2):
        assert key(number) in again
        np.testing.assert_array_equal(again.get(key(number), TOKENS), block(number))
    assert again.get(key(3), TOKENS) is None
    again.close(5)


@pytest.mark.parametrize("harm", ["cut", "longer", "flipped", "empty", "another's"])
def test_a_file_that_is_not_what_was_written_is_a_miss_and_goes(tmp_path, harm):
    store = open_store(tmp_path)
    put(store, 1, 2)
    [path, other] = files(tmp_path)
    data = path.read_bytes()
    path.write_bytes({
        "cut": data[:-1],
        "longer": data + b"x",
        "flipped": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "empty": b"",
        "another's": other.read_bytes(),
    }[harm])  # fmt: skip
    assert store.get(key(1), TOKENS) is None
    assert key(1) not in store
    assert not path.exists()
    np.testing.assert_array_equal(store.get(key(2), TOKENS), block(2))
    put(store, 1)
    np.testing.assert_array_equal(store.get(key(1), TOKENS), block(1))
    store.close(5)


def test_equal_keys_of_other_tokens_are_a_miss(tmp_path):
    store = open_store(tmp_path)
    put(store, 1)
    assert store.get(key(1), TOKENS[::-1]) is None
    store.close(5)


def test_a_file_that_somebody_removed_is_a_miss(tmp_path):
    store = open_store(tmp_path)
    put(store, 1)
    files(tmp_path)[0].unlink()
    assert store.get(key(1), TOKENS) is None
    store.close(5)


def test_the_size_is_a_bound_and_the_least_recently_used_goes_first(tmp_path):
    store = open_store(tmp_path, max_bytes=4 * (BLOCK + 200))
    put(store, 1, 2, 3, 4)
    store.touch(key(1))
    put(store, 5)
    assert [n for n in range(1, 6) if key(n) in store] == [1, 3, 4, 5]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * (BLOCK + 200)
    store.close(5)
    smaller = open_store(tmp_path, max_bytes=2 * (BLOCK + 200))
    assert len(files(tmp_path)) == 2
    assert held(smaller) == [1, 5]
    smaller.close(5)


def held(store: DiskStore) -> list[int]:
    return [number for number in range(10) if key(number) in store]


def held_after_restart(path: Path, num_blocks: int) -> list[int]:
    """Return which blocks a store keeps that has room for so many."""
    store = open_store(path, max_bytes=num_blocks * (BLOCK + 200))
    store.close(5)
    return held(store)


def test_a_restore_counts_as_use_and_keeps_the_head_of_a_text_longer_than_its_tail(tmp_path):
    store = open_store(tmp_path, max_bytes=4 * (BLOCK + 200))
    put(store, 1, 2, 3, 4)
    tier = KVTier([store], Blocks())
    assert len(tier.load([key(1), key(2)], [TOKENS] * 2)) == 2
    put(store, 5)
    assert held(store) == [1, 2, 4, 5]
    put(store, 6, 7)
    assert held(store) == [1, 5, 6, 7]
    tier.close(5)


def test_a_restore_counts_as_use_after_a_restart_also_that_of_another_process(tmp_path):
    first = open_store(tmp_path)
    put(first, 1, 2, 3, 4)
    reader = open_store(tmp_path)
    assert not reader.is_writer
    assert len(KVTier([reader], Blocks()).load([key(1), key(2)], [TOKENS] * 2)) == 2
    reader.close(5)
    first.close(5)
    assert held_after_restart(tmp_path, 3) == [1, 2, 4]
    assert held_after_restart(tmp_path, 1) == [1]


def test_what_the_pool_gives_up_again_counts_as_used(tmp_path):
    store = open_store(tmp_path, max_bytes=3 * (BLOCK + 200))
    tier = KVTier([store], Blocks())
    for number in (1, 2, 3, 1, 4):
        tier.store(number, key(number), TOKENS)
        store.settle()
    assert held(store) == [1, 3, 4]
    assert tier.num_stored == 4
    tier.close(5)


def test_what_was_kept_at_the_end_is_as_old_as_its_use(tmp_path):
    store = open_store(tmp_path)
    put(store, 1, 2)
    tier = KVTier([store], Blocks())
    for number in (3, 1, 4):  # the latest used first
        assert tier.keep(number, key(number), TOKENS, wait_s=1)
    tier.close(5)
    assert held_after_restart(tmp_path, 3) == [1, 3, 4]
    assert held_after_restart(tmp_path, 1) == [3]


def test_a_file_that_cannot_be_read_now_is_a_miss_and_stays(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    put(store, 1)

    def fail(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(kv_tier_disk, "FileIO", fail)
        assert store.get(key(1), TOKENS) is None
    assert "Too many open files" in caplog.text
    np.testing.assert_array_equal(store.get(key(1), TOKENS), block(1))
    store.close(5)


def test_a_folder_that_vanishes_while_it_is_listed_hides_no_other(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    put(store, 1, 2, 300)  # in the folders 00 and 01
    store.close(5)
    scandir, listdir = os.scandir, os.listdir

    def vanishing(of):
        def listing(path="."):
            if Path(path).name == "00":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return of(path)

        return listing

    monkeypatch.setattr(os, "scandir", vanishing(scandir))
    monkeypatch.setattr(os, "listdir", vanishing(listdir))
    again = open_store(tmp_path)
    assert [key(n) in again for n in (1, 2, 300)] == [False, False, True]
    put(again, 301)
    again.close(5)


def test_look_ups_wait_once_for_the_list_of_a_large_folder(tmp_path, monkeypatch):
    is_listed = threading.Event()
    monkeypatch.setattr(DiskStore, "_scan", lambda store: is_listed.wait(60))
    store = DiskStore(tmp_path, max_bytes=2**20, block_bytes=BLOCK)
    waits = []
    monkeypatch.setattr(store._is_scanned, "wait", waits.append)
    now = iter([10.0, 10.0, 10.4, 99.0])
    monkeypatch.setattr(kv_tier_disk, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert [key(1) in store for _ in range(3)] == [False] * 3
    assert waits == pytest.approx([0.5, 0.1, 0.0])
    monkeypatch.undo()
    is_listed.set()
    store.close(5)


@contextmanager
def full_disk():
    """Let no file grow beyond 100 bytes: writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_a_log_line_and_leaves_nothing_behind(tmp_path, caplog):
    store = open_store(tmp_path)
    put(store, 1)
    with full_disk():
        store.put(key(2), TOKENS, block(2))
        store.settle()
    assert "cannot write" in caplog.text
    assert len(files(tmp_path)) == 1
    assert not store.put(key(3), TOKENS, block(3))  # it pauses
    np.testing.assert_array_equal(store.get(key(1), TOKENS), block(1))
    store.close(5)


def test_a_second_store_reads_and_neither_writes_nor_removes(tmp_path):
    first = open_store(tmp_path)
    put(first, 1)
    second = open_store(tmp_path, max_bytes=BLOCK)  # too small for what is there
    assert (first.is_writer, second.is_writer) == (True, False)
    assert not second.put(key(2), TOKENS, block(2))
    np.testing.assert_array_equal(second.get(key(1), TOKENS), block(1))
    assert len(files(tmp_path)) == 1
    first.close(5)
    second.close(5)
    third = open_store(tmp_path)
    assert third.is_writer
    third.close(5)


def test_what_a_crash_left_is_cleared_away(tmp_path):
    store = open_store(tmp_path)
    put(store, 1)
    store.close(5)
    left = files(tmp_path)[0].with_name("ab.new")
    left.write_bytes(b"half")
    (tmp_path / "ab").mkdir(exist_ok=True)
    (tmp_path / "ab" / "no block").write_bytes(b"")
    store = open_store(tmp_path)
    assert not left.exists()
    assert key(1) in store
    store.close(5)


def test_close_writes_what_waits(tmp_path):
    store = open_store(tmp_path)
    for number in range(10):
        store.put(key(number), TOKENS, block(number))
    store.close(5)
    assert len(files(tmp_path)) == 10


def test_a_folder_that_cannot_be_written_is_refused_by_name():
    """Nobody may make a file there, not even root."""
    with pytest.raises(ParameterError, match=r"cannot use /sys: .*; choose a folder that can be"):
        open_store(Path("/sys"))


@contextmanager
def read_only():
    """Let the file system refuse every change, as one does that was mounted again read-only."""

    def refuse(path, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    open_path = Path.open

    def opening(path, mode="r", *args, **kwargs):
        return open_path(path, mode, *args, **kwargs) if mode in ("r", "rb") else refuse(path)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "replace"):
            patch.setattr(Path, name, refuse)
        patch.setattr(Path, "open", opening)
        patch.setattr(os, "utime", refuse)
        yield


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class Hours:
    """A clock that is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        times = SimpleNamespace(monotonic=lambda: self.now_s, time_ns=kv_tier_disk.time.time_ns)
        patch.setattr(kv_tier_disk, "time", times)


def test_a_folder_that_becomes_read_only_is_told_once_and_tried_ever_less_often(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    store = open_store(tmp_path, max_bytes=2 * (BLOCK + 200))
    put(store, 1, 2)
    clock = Hours(monkeypatch)
    taken = []
    with read_only():
        for minute in range(300):
            clock.now_s = minute * 60.0 + 1
            if store.put(key(3), TOKENS, block(3)):
                taken.append(minute)
                store.settle()
            for number in (1, 2):  # a file that cannot be removed is still there
                np.testing.assert_array_equal(store.get(key(number), TOKENS), block(number))
                store.touch(key(number))
    assert taken == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    [told] = warnings(caplog)
    assert str(tmp_path) in told
    assert "Read-only file system" in told
    clock.now_s = 1e6
    put(store, 4)
    assert held(store) == [2, 4]
    assert "writes to" in caplog.records[-1].getMessage()
    with full_disk():
        store.put(key(5), TOKENS, block(5))
        store.settle()
    assert len(warnings(caplog)) == 2  # another trouble is told again
    clock.now_s += 61
    put(store, 6)
    monkeypatch.undo()
    store.close(5)


def test_files_that_cannot_be_removed_are_read_all_the_same(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    put(store, 1, 2, 3)
    store.close(5)

    def refuse(path, **kwargs):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    small = open_store(tmp_path, max_bytes=BLOCK + 200)
    assert held(small) == [1, 2, 3]
    np.testing.assert_array_equal(small.get(key(1), TOKENS), block(1))
    assert not small.put(key(4), TOKENS, block(4))
    small.close(5)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("path", ["~nobody-has-this-name/kv", "a\0b"])
def test_a_folder_that_cannot_be_is_refused_by_name(path):
    with pytest.raises(ParameterError, match="cannot use"):
        open_store(Path(path))


def test_a_folder_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ParameterError, match=r"cannot use.*file"):
        open_store(tmp_path / "file")


# ---- whether it is worth it ----


class Blocks:
    """A backend of which only the blocks count."""

    def read_blocks(self, blocks):
        return np.stack([block(number) for number in blocks])


class Clock:
    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def test_what_is_slower_to_restore_than_to_compute_is_computed_but_not_for_ever(tmp_path):
    store = open_store(tmp_path)
    tier = KVTier([store], Blocks(), clock=Clock(step_s=1.0))
    for number in (1, 2):
        tier.store(number, key(number), TOKENS)
        store.settle()
    keys = [key(1), key(2), key(3)]
    assert tier.num_worth_restoring(keys, 16) == 2  # nothing is known yet
    data = tier.load(keys[:2], [TOKENS, TOKENS])  # a second for each
    np.testing.assert_array_equal(data, np.stack([block(1), block(2)]))
    tier.observe(512, 512 * 0.1)
    assert tier.num_worth_restoring(keys, 16) == 2  # 1 s against 1.6 s a block
    for _ in range(30):
        tier.observe(512, 512 * 0.01)
    assert tier.num_worth_restoring(keys, 16) == 0  # 1 s against 0.16 s
    assert 2 in {tier.num_worth_restoring(keys, 16) for _ in range(40)}
    tier.close(5)


def test_a_block_that_is_stored_is_not_written_again(tmp_path):
    store = open_store(tmp_path)
    tier = KVTier([store], Blocks())
    for _ in range(3):
        tier.store(1, key(1), TOKENS)
        store.settle()
    assert tier.num_stored == 1
    tier.close(5)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("tape:path=x", "tape"),
        ("disk:size=1G", "path"),
        ("disk:path=x", "size"),
        ("disk:path=x,size=1G,speed=2", "speed"),
        ("disk:path=x,size=lots", "kv_tier is .*lots"),
        ("disk:path=x,size=1K", "1024"),
        ("host:size=1K", "host KV tier is 1024"),
        ("host:path=x,size=1G", "path"),
        ("host:size=1T", "memory are free"),
        ("host", "size"),
        ("disk:path=x,size=1G+host:size=1M", "known is"),
        ("host:size=1M+host:size=1M", "known is"),
        ("host:size=1M+tape:path=x", "tape"),
    ],
)
def test_a_bad_spec_is_refused_by_name(tmp_path, monkeypatch, spec, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=named):
        open_tier(spec, Blocks())


def test_a_tier_without_the_cache_is_refused():
    with pytest.raises(ParameterError, match="--no-prefix-cache"):
        EngineConfig(kv_tier="disk:path=x,size=1G", prefix_cache=False)
