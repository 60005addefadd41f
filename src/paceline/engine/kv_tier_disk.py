"""DiskStore: KV blocks as files of a folder, one a block, named by their hash."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import queue
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ParameterError

U8 = npt.NDArray[np.uint8]

# A file: this head, the token ids, the block.
_HEAD = struct.Struct("<16s32s")  # magic with the format's version, sha256 of all else and the name
_MAGIC = b"paceline-kv-1\n\0\0"
_TEMPORARY = ".new"
_QUEUE_BYTES = 64 * 2**20  # blocks that wait for the disk, at most
_SCAN_S = 0.5  # that look-ups wait for the list of a large folder, all together
_PAUSE_S = 60.0  # without writing, after the disk refused; doubled where it refuses again
_MAX_PAUSE_S = 3600.0

log = logging.getLogger(__name__)


class DiskStore:
    """Holds at most `max_bytes` in `path`; what was used longest ago goes first.

    The cache is only ever a help: a file that is cut or altered is a miss and is removed, a disk
    that is full, read-only or broken costs a log line and pauses without writing. Files are written
    under another name and renamed, and never change: any number of processes may read them. One
    process at a time writes and removes, the one that holds the lock; the names say for which model
    and format they are.
    """

    is_lasting = True

    def __init__(self, path: Path, *, max_bytes: int, block_bytes: int) -> None:
        try:
            path = path.expanduser()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it tells what was said
            self._lock_file = (path / "lock").open("ab")
        except (OSError, RuntimeError, ValueError) as error:  # no such home; a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise ParameterError(
                f"the KV tier cannot use {path}: {reason}; choose a folder that can be written",
                param="kv_tier",
            ) from None
        self._path = path
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # guards the three below
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of files, latest used last
        self._num_bytes = 0
        self._is_scanned = threading.Event()
        self._scan_by = 0.0  # until when look-ups wait for that; 0: none has asked yet
        self._is_closed = False
        self._pause_s = 0.0  # of the latest refusal to write; 0: there was none since a success
        self._paused_until = 0.0
        self._queue: queue.Queue[tuple[bytes, bytes, U8] | None] = queue.Queue(
            max(1, _QUEUE_BYTES // block_bytes)
        )
        self.is_writer = self._take_lock()
        self._thread = threading.Thread(target=self._write_all, name="kv-tier", daemon=True)
        self._thread.start()

    def _take_lock(self) -> bool:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("another process writes to %s: this one only reads from it", self._path)
            return False
        return True

    def __contains__(self, key: bytes) -> bool:
        if not self._is_scanned.is_set():  # or the first prompt after a restart might find nothing
            self._scan_by = self._scan_by or time.monotonic() + _SCAN_S
            self._is_scanned.wait(max(self._scan_by - time.monotonic(), 0.0))
        return key in self._sizes

    def put(self, key: bytes, tokens: bytes, block: U8, *, wait_s: float = 0.0) -> bool:
        if not self.is_writer or self._is_closed or time.monotonic() < self._paused_until:
            return False
        try:
            self._queue.put((key, tokens, block), block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            return False
        return True

    def get(self, key: bytes, tokens: bytes) -> U8 | None:
        path = self._file(key)
        try:
            with FileIO(path) as file:
                data = np.empty(_HEAD.size + len(tokens) + self._block_bytes, np.uint8)
                is_whole = file.readinto(data) == data.nbytes and not file.read(1)  # type: ignore[arg-type]
            if is_whole and data[: _HEAD.size].tobytes() == _head(key, data[_HEAD.size :]):
                begin = _HEAD.size + len(tokens)
                if data[_HEAD.size : begin].tobytes() == tokens:
                    return data[begin:]
            log.warning("%s is cut or altered: it is removed and computed again", path)
        except FileNotFoundError:
            pass
        except OSError as error:  # too many open files, say: nothing is wrong with this one
            log.warning("%s cannot be read: %s; it is computed again", path, error)
            return None
        self._remove(key)
        return None

    def touch(self, key: bytes) -> None:
        """Count a block as used now, here and for whoever opens the folder later."""
        with suppress(OSError):
            _stamp(self._file(key))
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def latest(self) -> list[bytes]:
        with self._lock:
            return list(reversed(self._sizes))

    def settle(self) -> None:
        """Wait until all that was there is found, and all that was put is written or given up."""
        self._is_scanned.wait()
        self._queue.join()

    def close(self, timeout_s: float) -> None:
        """Write what waits, as far as the time allows, and give the lock back. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():  # or it goes on writing, until the process ends
            self._lock_file.close()

    # ---- the writing thread ----

    def _write_all(self) -> None:
        self._scan()
        self._is_scanned.set()
        while True:
            item = self._queue.get()
            try:
                if item is None:
                    return
                self._write(*item)
            finally:
                self._queue.task_done()

    def _scan(self) -> None:
        """Find what is there, oldest first; clear away what a crash has left."""
        found = []
        for path in self._listed():
            with suppress(OSError, ValueError):
                if path.name.endswith(_TEMPORARY):
                    if self.is_writer:
                        path.unlink()
                    continue
                stat = path.stat()
                found.append((stat.st_mtime_ns, bytes.fromhex(path.name), stat.st_size))
        with self._lock:
            for _, key, size in sorted(found):
                self._sizes[key] = size
                self._num_bytes += size
        if self.is_writer:
            try:
                self._make_room(0)
            except OSError as error:
                self._pause(error)

    def _listed(self) -> Iterator[Path]:
        """Yield what lies where blocks do; a folder that is gone, or fails, has nothing."""
        for number in range(256):
            with suppress(OSError):
                yield from list((self._path / f"{number:02x}").iterdir())

    def _write(self, key: bytes, tokens: bytes, block: U8) -> None:
        if key in self._sizes or time.monotonic() < self._paused_until:
            return
        path = self._file(key)
        temporary = path.with_name(path.name + _TEMPORARY)
        body = np.concatenate([np.frombuffer(tokens, np.uint8), block])
        size = _HEAD.size + body.nbytes
        try:
            self._make_room(size)
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                file.write(_head(key, body))
                file.write(body.data)
            _stamp(temporary)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self._pause(error)
            return
        if self._pause_s:
            self._pause_s = 0.0
            log.info("the KV tier writes to %s again", self._path)
        with self._lock:
            self._sizes[key] = size
            self._num_bytes += size

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while, longer each time; of refusals in a row the first is told."""
        if not self._pause_s:
            log.warning(
                "the KV tier cannot write to %s: %s; it goes on with what is there, and tries "
                "again now and then",
                self._path,
                error,
            )
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_S), _MAX_PAUSE_S)
        self._paused_until = time.monotonic() + self._pause_s

    def _make_room(self, size: int) -> None:
        """Remove files until so many bytes more fit. Raises OSError where one cannot be removed."""
        while self._num_bytes + size > self._max_bytes:
            with self._lock:
                key = next(iter(self._sizes), None)
            if key is None:
                return
            self._file(key).unlink(missing_ok=True)
            self._forget(key)

    def _remove(self, key: bytes) -> None:
        if self.is_writer:
            with suppress(OSError):
                self._file(key).unlink()
        self._forget(key)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(key, 0)

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._path / name[:2] / name


def _stamp(path: Path) -> None:
    """Set when a file was used, finer than the clock that the kernel sets it by."""
    now_ns = time.time_ns()
    os.utime(path, ns=(now_ns, now_ns))


def _head(key: bytes, body: U8) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(body.data)
    return _HEAD.pack(_MAGIC, digest.digest())
