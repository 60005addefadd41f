"""HostStore: KV blocks in the memory of the host."""

from __future__ import annotations

import time
from collections import OrderedDict

from paceline.engine.kv_tier import U8, Store
from paceline.engine.memory import available_memory, format_bytes
from paceline.errors import ParameterError


class HostStore:
    """Holds at most `max_bytes`; what came first is given up first, `below` where there is a store.

    A block that is fetched leaves it: it lies in the pool again, and comes back from there.
    Memory is taken as blocks come.
    """

    is_lasting = False

    def __init__(self, *, max_bytes: int, below: Store | None = None) -> None:
        room = available_memory()
        if max_bytes > room:
            raise ParameterError(
                f"the host KV tier may take {format_bytes(max_bytes)}, but only "
                f"{format_bytes(room)} of memory are free: give it less, as in host:size="
                f"{room // 2**21}M",
                param="kv_tier",
            )
        self._max_bytes = max_bytes
        self._below = below
        self._blocks: OrderedDict[bytes, tuple[bytes, U8]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, key: bytes, tokens: bytes, block: U8, *, wait_s: float = 0.0) -> bool:
        if key in self._blocks:
            return True
        self._num_bytes += len(tokens) + block.nbytes
        self._blocks[key] = (tokens, block)
        while self._num_bytes > self._max_bytes:
            self._hand_down(*self._take(last=False))
        return key in self._blocks

    def get(self, key: bytes, tokens: bytes) -> U8 | None:
        if key not in self._blocks or self._blocks[key][0] != tokens:
            return None
        self._blocks.move_to_end(key)
        return self._take(last=True)[2]

    def touch(self, key: bytes) -> None:
        if key in self._blocks:
            self._blocks.move_to_end(key)

    def latest(self) -> list[bytes]:
        return list(reversed(self._blocks))

    def close(self, timeout_s: float) -> None:
        """Hand all to the store below, the latest first, as far as the time allows."""
        deadline = time.monotonic() + timeout_s
        while self._blocks and (left_s := deadline - time.monotonic()) > 0:
            if not self._hand_down(*self._take(last=True), wait_s=left_s):
                break
        self._blocks.clear()
        self._num_bytes = 0

    def _take(self, *, last: bool) -> tuple[bytes, bytes, U8]:
        key, (tokens, block) = self._blocks.popitem(last=last)
        self._num_bytes -= len(tokens) + block.nbytes
        return key, tokens, block

    def _hand_down(self, key: bytes, tokens: bytes, block: U8, *, wait_s: float = 0.0) -> bool:
        """Give a block to the store below; return False where it takes none."""
        if self._below is None:
            return False
        if key in self._below:
            self._below.touch(key)
            return True
        return self._below.put(key, tokens, block, wait_s=wait_s)
