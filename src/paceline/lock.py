"""Lock: what one process at a time may work on."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from paceline.errors import OutputError


class Lock:
    """An exclusive lock on the file or folder `path`, which ends with the process at the latest.

    `flags` are those of os.open, and `busy` is what is said to who finds it taken. While it is
    held, `fd` is `path` opened.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY, *, busy: str) -> None:
        self.fd = -1
        self._path = path
        self._flags = flags
        self._busy = busy

    def take(self) -> None:
        """Lock it, without a wait. Raises OutputError where another process has done so.

        Raises OSError where it cannot be opened.
        """
        while self.fd < 0:
            fd = os.open(self._path, self._flags, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(fd):
                    self.fd = fd
            except BlockingIOError:
                raise OutputError(self._busy) from None
            finally:
                if self.fd != fd:
                    os.close(fd)

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _is_there(self, fd: int) -> bool:
        """Whether the path is still what was opened: who held it may have just moved it away."""
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False
