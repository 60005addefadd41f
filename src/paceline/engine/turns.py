"""Turns: engines that share a machine's cores compute one step at a time."""

from __future__ import annotations

import threading
import time
from collections import deque


class Turns:
    """Entered around a step; gives the ns that it was waited for. Who waits longest goes next.

    Each engine's step uses all cores. Two at once would be twice as many threads as cores, and each
    would wait at its barriers for threads that the other keeps from running.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released to let its thread in

    def __enter__(self) -> int:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return 0
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        start_ns = time.monotonic_ns()
        gate.acquire()
        return time.monotonic_ns() - start_ns

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False
