"""Collecting: whole garbage collections happen while no call is open."""

from __future__ import annotations

import gc
from types import TracebackType

_NEVER = 2**30
_FEW = 10  # collections of the young after which CPython looks at all objects
_MANY = 5000  # with each some 7,000 more containers were made than let go: tens of millions


class IdleCollector:
    """While inside, no open call waits for CPython to walk all that is alive.

    That takes 50 to 100 ms beside a burst of connections, holds Python's lock, and finds nearly
    nothing: what a call leaves goes with its last reference. A server that is never idle collects
    after `many` collections of the young all the same, so that cycles cannot fill the memory.
    """

    def __init__(self, *, many: int = _MANY) -> None:
        self._many = many

    def __enter__(self) -> IdleCollector:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.set_threshold(*self._thresholds)

    def look(self, *, is_idle: bool) -> None:
        """Collect if it is time to. Called a few times a second."""
        if gc.get_count()[2] > (_FEW if is_idle else self._many):
            gc.collect()
