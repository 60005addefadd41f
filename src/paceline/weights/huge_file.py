"""Files whose pages the kernel can keep and map in pieces of 2 MiB.

A step reads all weights: of pages of 4 KiB each is a fault at first, and misses the TLB ever after.
ext4, XFS and btrfs keep what came in one piece, at a multiple of its size, in one piece of the page
cache (Linux 6.x), and map it by one entry. Elsewhere nothing is lost.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

HUGE_BYTES = 1 << 21


class RawFile(Protocol):
    """A file without a buffer of its own."""

    def write(self, data: memoryview, /) -> int | None: ...


class HugeWriter:
    """Hands a file its bytes in whole pieces, from its beginning on. All raise OSError."""

    def __init__(self, file: RawFile) -> None:
        self.position = 0
        self._file = file
        self._piece = memoryview(bytearray(HUGE_BYTES))

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            fill = self.position % HUGE_BYTES
            part = rest[: HUGE_BYTES - fill]
            self._piece[fill : fill + len(part)] = part
            rest = rest[len(part) :]
            self.position += len(part)
            if self.position % HUGE_BYTES == 0:
                self._put(HUGE_BYTES)

    def finish(self) -> None:
        """Write the last piece, which is not whole; nothing may follow."""
        self._put(self.position % HUGE_BYTES)

    def _put(self, num_bytes: int) -> None:
        piece = self._piece[:num_bytes]
        while len(piece):
            piece = piece[self._file.write(piece) or 0 :]


def map_file(path: Path) -> U8:
    """Return the bytes of a file, mapped; raises OSError, or ValueError for an empty one.

    What is not in the page cache is read in huge pieces, too.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)
