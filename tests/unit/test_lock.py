"""Lock: one holder at a time, of what lies at the path now."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from paceline.errors import OutputError
from paceline.lock import Lock


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_comes_second_is_told_and_leaves_no_file_open(tmp_path: Path) -> None:
    first, second = (Lock(tmp_path, busy=f"{tmp_path} is taken") for _ in range(2))
    first.take()
    before = num_open()
    with pytest.raises(OutputError, match="is taken"):
        second.take()
    assert (second.fd, num_open()) == (-1, before)
    first.release()
    second.take()
    assert second.fd >= 0


def test_what_is_released_twice_closes_nothing_of_others(tmp_path: Path) -> None:
    lock = Lock(tmp_path, busy="")
    lock.take()
    lock.release()
    with (tmp_path / "file").open("w") as file:  # the same number again
        lock.release()
        assert os.fstat(file.fileno())


def test_a_file_that_was_deleted_while_it_was_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a run that ends between the two: a lock on a file without a name keeps nobody out."""
    path, calls = tmp_path / "state", []

    def flock(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
        original(fd, operation)

    original = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    lock = Lock(path, os.O_RDWR | os.O_CREAT, busy="taken")
    lock.take()
    assert len(calls) == 2
    assert os.path.samestat(os.fstat(lock.fd), path.stat())
    with pytest.raises(OutputError, match="taken"):
        Lock(path, busy="taken").take()


def test_what_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "none", busy="").take()
