"""KVTier: blocks that the pool gives up go to stores, and come back where that is faster."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.config import parse_bytes, parse_spec
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.backends.base import Backend

U8 = npt.NDArray[np.uint8]

_FORGET = 0.8  # weight of what a restore or a token cost before, when one is measured
_MIN_TOKENS = 32  # of a step from which the cost of computing a token is learnt
_DOUBT = 0.95  # a cost that kept the tier from restoring fades, or it would be believed for ever
_OPTIONS = {"host": ("size",), "disk": ("path", "size")}
_FORMS = "host:size=2G, disk:path=DIR,size=4G, or both as host:…+disk:…"


class Store(Protocol):
    """Keeps blocks by the hash of their tokens and all before; `tokens` guard against mix-ups."""

    @property
    def is_lasting(self) -> bool:
        """Whether what is in it outlives the process."""

    def __contains__(self, key: bytes) -> bool: ...

    def put(self, key: bytes, tokens: bytes, block: U8, *, wait_s: float = 0.0) -> bool:
        """Take a block, now or by and by; return False where it cannot be taken."""

    def get(self, key: bytes, tokens: bytes) -> U8 | None:
        """Return the block as it was put, or None. It is not to be written to."""

    def touch(self, key: bytes) -> None:
        """Count a block as used now; one that is not there is ignored."""

    def latest(self) -> list[bytes]:
        """Return the keys, the one that was used last first."""

    def close(self, timeout_s: float) -> None:
        """Write what has been taken, and let go of the store."""


class _Level(Struct):
    """A store, and the measured seconds of a block from it; 0: not known."""

    store: Store
    restore_s: float = 0.0


class KVTier:
    """Moves blocks between a backend and stores, and weighs restoring against computing.

    Blocks go to the first of `stores`, the quickest. All costs are measured, each store's apart;
    what is not measured yet is tried.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        backend: Backend,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.is_closed = False
        self.num_stored = 0
        self.num_restored = 0
        self._levels = [_Level(store) for store in stores]
        self._backend = backend
        self._clock = clock
        self._compute_s = 0.0  # of a token; 0: not known
        self._kept: list[bytes] = []  # at the end, the latest used first

    @property
    def is_lasting(self) -> bool:
        """Whether anything that is stored outlives the process."""
        return self._levels[-1].store.is_lasting

    def observe(self, num_tokens: int, forward_s: float) -> None:
        """Learn what a step cost."""
        if num_tokens >= _MIN_TOKENS:
            self._compute_s = _fade(self._compute_s, forward_s / num_tokens)

    def store(self, block: int, key: bytes, tokens: bytes) -> None:
        """Hand a block that is given up to the first store; a store that is full leaves it.

        Where it lies there already, it was used since: a beginning that never leaves the pool for
        long would else be the first that the store gives up.
        """
        first = self._levels[0].store
        if key in first:
            first.touch(key)
        else:
            self._put(first, block, key, tokens)

    def keep(self, block: int, key: bytes, tokens: bytes, *, wait_s: float) -> bool:
        """Hand a block to the store that outlives the process; return False where it is full.

        This is for the end: the block that was used last comes first.
        """
        self._kept.append(key)
        last = self._levels[-1].store
        return key in last or self._put(last, block, key, tokens, wait_s)

    def _put(
        self, store: Store, block: int, key: bytes, tokens: bytes, wait_s: float = 0.0
    ) -> bool:
        is_taken = store.put(key, tokens, self._backend.read_blocks([block])[0], wait_s=wait_s)
        self.num_stored += is_taken
        return is_taken

    def num_worth_restoring(self, keys: Sequence[bytes], block_size: int) -> int:
        """Return how many of the first `keys` shall be restored rather than computed.

        As many as save the most time in all: a block that is slow to fetch may lead to quick ones.
        """
        found: list[_Level] = []
        for key in keys:
            level = self._level_of(key)
            if level is None:
                break
            found.append(level)
        if not self._compute_s:
            return len(found)
        block_s = self._compute_s * block_size
        saved_s = list(accumulate((block_s - level.restore_s for level in found), initial=0.0))
        num_best = max(range(len(saved_s)), key=lambda n: (saved_s[n], n))
        for level in self._levels:
            if level.restore_s > block_s and any(level is other for other in found[num_best:]):
                level.restore_s *= _DOUBT
        return num_best

    def _level_of(self, key: bytes) -> _Level | None:
        return next((level for level in self._levels if key in level.store), None)

    def load(self, keys: Sequence[bytes], tokens: Sequence[bytes]) -> U8:
        """Return the first of these blocks, [number, bytes], as many as the stores really have."""
        data: U8 = np.empty((0, 0), np.uint8)
        found: list[tuple[_Level, bytes]] = []
        spent: dict[int, list[float]] = {}  # by store, of each block
        for key, packed in zip(keys, tokens, strict=True):
            begin = self._clock()
            number, block = self._fetch(key, packed)
            if block is None:
                break
            if not found:
                data = np.empty((len(keys), block.nbytes), np.uint8)
            data[len(found)] = block
            found.append((self._levels[number], key))
            spent.setdefault(number, []).append(self._clock() - begin)
        for number, seconds in spent.items():
            level = self._levels[number]
            level.restore_s = _fade(level.restore_s, sum(seconds) / len(seconds))
        for level, key in reversed(found):  # or the head of a sequence would go before its tail
            level.store.touch(key)
        self.num_restored += len(found)
        return data[: len(found)]

    def _fetch(self, key: bytes, packed: bytes) -> tuple[int, U8 | None]:
        """Return a block and the number of the store that had it whole."""
        for number, level in enumerate(self._levels):
            block = level.store.get(key, packed) if key in level.store else None
            if block is not None:
                return number, block
        return -1, None

    def close(self, timeout_s: float) -> None:
        """Close the stores, the first one first: what it has may go to the next.

        What was used last went first, so that it gets there; then its age is put right.
        """
        self.is_closed = True
        deadline = self._clock() + timeout_s
        used = list(self._kept)
        for level in self._levels[:-1]:
            used += level.store.latest()
        for level in self._levels:
            level.store.close(max(deadline - self._clock(), 0.1))
        for key in reversed(used):
            self._levels[-1].store.touch(key)


def _fade(mean: float, value: float) -> float:
    return value if not mean else mean * _FORGET + value * (1 - _FORGET)


def open_tier(spec: str, backend: Backend) -> KVTier:
    """Return the tier that `spec` means, for a loaded backend.

    Known are "host:size=2G", "disk:path=DIR,size=4G", and the first before the second, joined by
    "+". Raises ParameterError saying what is wrong.
    """
    block_bytes = backend.read_blocks([0]).shape[1]
    stores: list[Store] = []
    for name, max_bytes, path in reversed(parse_tier(spec)):  # one gives up to the one after it
        if max_bytes < block_bytes:
            raise ParameterError(
                f"the size of the {name} KV tier is {max_bytes} bytes, one block has "
                f"{block_bytes}: give it more",
                param="kv_tier",
            )
        stores.insert(0, _open(name, path, max_bytes, block_bytes, stores))
    return KVTier(stores, backend)


def parse_tier(spec: str) -> list[tuple[str, int, str]]:
    """Return the stores that `spec` names: (name, bytes, path). None is opened yet.

    Raises ParameterError saying what is wrong.
    """
    try:
        parts = [_parse(part) for part in re.split(r"\+(?=[a-z]+:)", spec)]
        sizes = [parse_bytes(options["size"]) for _, options in parts]
    except ParameterError as error:
        raise ParameterError(f"kv_tier is {spec!r}: {error}", param="kv_tier") from None
    names = [name for name, _ in parts]
    if names not in (["host"], ["disk"], ["host", "disk"]):
        raise ParameterError(f"kv_tier is {spec!r}: known is {_FORMS}", param="kv_tier")
    return [
        (name, size, options.get("path", ""))
        for (name, options), size in zip(parts, sizes, strict=True)
    ]


def _open(name: str, path: str, max_bytes: int, block_bytes: int, below: list[Store]) -> Store:
    if name == "host":
        from paceline.engine.kv_tier_host import HostStore

        return HostStore(max_bytes=max_bytes, below=below[0] if below else None)
    from paceline.engine.kv_tier_disk import DiskStore

    return DiskStore(Path(path), max_bytes=max_bytes, block_bytes=block_bytes)


def _parse(spec: str) -> tuple[str, dict[str, str]]:
    name, options = parse_spec(spec)
    if name not in _OPTIONS:
        raise ParameterError(f"known is {_FORMS}")
    known = _OPTIONS[name]
    for key in known:
        if key not in options:
            raise ParameterError(f"{name} has no {key}: known is {_FORMS}")
    for key in options.keys() - set(known):
        raise ParameterError(f"{name} has no option {key!r}: known are {', '.join(known)}")
    return name, options
