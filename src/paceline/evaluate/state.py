"""State: results by key in a file that grows a line an item, so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.catalog.store import home
from paceline.errors import OutputError, ParameterError
from paceline.lock import Lock


def default_path(identity: Mapping[str, Any]) -> Path:
    """Return where an evaluation keeps its state: one place for each `identity`."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return home() / "evaluations" / f"{digest[:24]}.jsonl"


class State:
    """A context over the file at `path`, for one process at a time.

    The first line is the `identity` of the work, each other one item. A line that a kill cut short
    is dropped. Floats survive the file bit by bit, so a resumed run has the figures of a whole one.
    `option` is how a user names another place for it.
    """

    def __init__(
        self, path: Path, identity: Mapping[str, Any], *, option: str = "another file with --state"
    ) -> None:
        self.path = path
        self.num_resumed = 0
        self._option = option
        self._identity = json.loads(json.dumps(identity))
        self._items: dict[str, Any] = {}
        self._lock = Lock(
            path,
            os.O_RDWR | os.O_CREAT | os.O_APPEND,
            busy=f"another run writes the state {path}: wait for its end",
        )

    def __enter__(self) -> State:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except OSError as error:
            raise OutputError(
                f"the state {self.path} cannot be written: {error.strerror}; name {self._option}"
            ) from None
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._lock.release()

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def put(self, key: str, value: Any) -> None:
        """Keep the result of one item; it is in the file when this returns."""
        self._append({"key": key, "value": value})
        self._items[key] = value

    def remove(self) -> None:
        """Delete the file: the work is done and its result is out."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        data = self.path.read_bytes()
        if not data:
            self._append({"identity": self._identity})
            return
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            found = lines[0]["identity"]
            self._items = {line["key"]: line["value"] for line in lines[1:]}
        except (ValueError, IndexError, KeyError, TypeError):
            raise ParameterError(
                f"{self.path} is no state of an evaluation: delete it, or name {self._option}"
            ) from None
        if found != self._identity:
            names = sorted(
                name for name in {*found, *self._identity}
                if found.get(name) != self._identity.get(name)
            )  # fmt: skip
            raise ParameterError(
                f"{self.path} is the state of another evaluation (it differs in "
                f"{', '.join(names)}): delete it, or name {self._option}"
            )
        os.ftruncate(self._lock.fd, len(whole))
        self.num_resumed = len(self._items)

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._lock.fd, data) :]
        except OSError as error:
            raise OutputError(
                f"the state {self.path} cannot be written: {error.strerror}; make room and run "
                "the same command again"
            ) from None
