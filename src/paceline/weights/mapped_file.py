"""A file mapped read-only, and a clear word on files that are no model at all."""

from __future__ import annotations

import mmap
import re
import stat
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ModelFormatError, ModelNotFoundError


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The file's bytes as a read-only array that costs no memory until it is read.

    Raises ModelNotFoundError if it cannot be opened or is no regular file, and ModelFormatError if
    it is empty, a Git LFS pointer, or a web page saved in the model's place.
    """
    try:
        # Asked before it is opened: opening a pipe waits for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFoundError(f"cannot read {path}: it is no regular file")
        with path.open("rb") as file:
            head = file.read(200)
            if not head:
                raise ModelFormatError(f"{path} is empty (0 bytes): download it again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelNotFoundError(f"cannot read {path}: {reason}") from error
    except ValueError as error:  # files of /proc have content and no size
        raise ModelFormatError(f"{path} cannot be mapped ({error}): copy it to a disk") from error
    _refuse_stand_in(path, head, len(mapped))
    return np.frombuffer(mapped, np.uint8)


def drop_pages(data: npt.NDArray[np.uint8]) -> None:
    """Let the pages of a range of a mapped file leave resident memory: it has been read."""
    base: object = data
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, mmap.mmap):
        return
    start = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and hasattr(mapped, "madvise"):
        with suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED, first, length)


def _refuse_stand_in(path: Path, head: bytes, size: int) -> None:
    if head.startswith(b"version https://git-lfs"):
        match = re.search(rb"size (\d+)", head)
        expected = f"{int(match[1])} bytes" if match else "the model"
        raise ModelFormatError(
            f"{path} is a Git LFS pointer ({size} bytes), not the file it stands for "
            f"({expected}): run `git lfs pull`"
        )
    if head.lstrip()[:5].lower() in (b"<html", b"<!doc"):
        raise ModelFormatError(f"{path} is a web page ({size} bytes): download the model again")
