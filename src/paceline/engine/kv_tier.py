"""KVTier: blocks that the pool gives up go to a store, and come back where that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paceline.config import parse_bytes, parse_spec
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.backends.base import Backend

U8 = npt.NDArray[np.uint8]

_FORGET = 0.8  # weight of what a restore or a token cost before, when one is measured
_MIN_TOKENS = 32  # of a step from which the cost of computing a token is learnt
_DOUBT = 0.95  # a cost that kept the tier from restoring fades, or it would be believed for ever


class Store(Protocol):
    """Keeps blocks by the hash of their tokens and all before; `tokens` guard against mix-ups."""

    def __contains__(self, key: bytes) -> bool: ...

    def put(self, key: bytes, tokens: bytes, block: U8, *, wait_s: float = 0.0) -> bool:
        """Take a block, to be written by and by; return False where it cannot be taken."""

    def get(self, key: bytes, tokens: bytes) -> U8 | None:
        """Return the block as it was put, or None."""

    def close(self, timeout_s: float) -> None:
        """Write what has been taken, and let go of the store."""


class KVTier:
    """Moves blocks between a backend and a store, and weighs restoring against computing.

    Both costs are measured; what is not measured yet is tried.
    """

    def __init__(
        self, store: Store, backend: Backend, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.is_closed = False
        self.num_stored = 0
        self.num_restored = 0
        self._store = store
        self._backend = backend
        self._clock = clock
        self._restore_s = 0.0  # of a block; 0: not known
        self._compute_s = 0.0  # of a token; 0: not known

    def observe(self, num_tokens: int, forward_s: float) -> None:
        """Learn what a step cost."""
        if num_tokens >= _MIN_TOKENS:
            self._compute_s = _fade(self._compute_s, forward_s / num_tokens)

    def store(self, block: int, key: bytes, tokens: bytes, *, wait_s: float = 0.0) -> bool:
        """Hand a block to the store; return False where it cannot take any more now."""
        if key in self._store:
            return True
        data = self._backend.read_blocks([block])[0]
        is_taken = self._store.put(key, tokens, data, wait_s=wait_s)
        self.num_stored += is_taken
        return is_taken

    def num_worth_restoring(self, keys: Sequence[bytes], block_size: int) -> int:
        """Return how many of the first `keys` shall be restored rather than computed."""
        num_known = next((i for i, key in enumerate(keys) if key not in self._store), len(keys))
        if num_known and self._compute_s and self._restore_s > self._compute_s * block_size:
            self._restore_s *= _DOUBT
            return 0
        return num_known

    def load(self, keys: Sequence[bytes], tokens: Sequence[bytes]) -> U8:
        """Return the first of these blocks, [number, bytes], as many as the store really has."""
        begin = self._clock()
        found: list[U8] = []
        for key, packed in zip(keys, tokens, strict=True):
            block = self._store.get(key, packed)
            if block is None:
                break
            found.append(block)
        if not found:
            return np.empty((0, 0), np.uint8)
        data = np.stack(found)
        self._restore_s = _fade(self._restore_s, (self._clock() - begin) / len(found))
        self.num_restored += len(found)
        return data

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        self._store.close(timeout_s)


def _fade(mean: float, value: float) -> float:
    return value if not mean else mean * _FORGET + value * (1 - _FORGET)


def open_tier(spec: str, backend: Backend) -> KVTier:
    """Return the tier that "disk:path=DIR,size=4G" means, for a loaded backend."""
    name, options = parse_spec(spec)
    if name != "disk":
        raise ParameterError(
            f"kv_tier is {spec!r}: known is disk:path=DIR,size=4G", param="kv_tier"
        )
    for key in ("path", "size"):
        if key not in options:
            raise ParameterError(
                f"kv_tier {spec!r} has no {key}: write disk:path=DIR,size=4G", param="kv_tier"
            )
    for key in options.keys() - {"path", "size"}:
        raise ParameterError(
            f"kv_tier has no option {key!r}: known are path and size", param="kv_tier"
        )
    from paceline.engine.kv_tier_disk import DiskStore

    block_bytes = backend.read_blocks([0]).shape[1]
    store = DiskStore(
        Path(options["path"]).expanduser(),
        max_bytes=parse_bytes(options["size"]),
        block_bytes=block_bytes,
    )
    return KVTier(store, backend)
