"""AccessLog: a line of JSON for each call, what it cost included. No prompt, no answer."""

from __future__ import annotations

import logging
import sys
from typing import IO, Any

import msgspec

from paceline.errors import ParameterError
from paceline.server.calls import Call
from paceline.server.timeline import describe

logger = logging.getLogger(__name__)


class AccessLog:
    """Appends to a file, or writes to stderr for "-"."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = self._open()

    def write(self, call: Call) -> None:
        line: dict[str, Any] = {"client": call.client or None, **describe(call)}
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:  # a full disk must not end the answers
            logger.error("the access log lost a line: %s", error)

    def close(self) -> None:
        if self._path != "-":
            self._file.close()

    def _open(self) -> IO[bytes]:
        if self._path == "-":
            return sys.stderr.buffer
        try:
            return open(self._path, "ab")
        except OSError as error:
            raise ParameterError(
                f"the access log {self._path} cannot be written: {error.strerror}; choose another "
                "--access-log"
            ) from None
