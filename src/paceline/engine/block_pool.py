"""BlockPool: ref-counted blocks of the paged KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class EngineIntegrityError(AssertionError):
    """The books of the engine do not close: a bug, never a user's mistake."""


class BlockPool:
    """Who holds which KV block. A block is free, live (one holder or more), or cached.

    A cached block has no holder, but its content is kept until the memory is needed: those let go
    of first are given up first. The books close: free + live + cached == total.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None  # told of content given up
        self._num_holders = [0] * num_blocks
        self._is_kept = [False] * num_blocks  # the content outlives the last holder
        self._free = list(range(num_blocks - 1, -1, -1))  # the last one is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first one is given up first

    @property
    def num_free(self) -> int:
        """Blocks with nothing worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def kept(self) -> set[int]:
        return {block for block, is_kept in enumerate(self._is_kept) if is_kept}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones that are given up for it."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_blocks - self.num_available

    def latest_cached(self) -> list[int]:
        """Return the cached blocks, the last to be given up first."""
        return list(reversed(self._cached))

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks of one holder each. Precondition: `count <= num_available`."""
        if count > self.num_available:
            raise EngineIntegrityError(
                f"{count} blocks asked for, {self.num_available} are available"
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._is_kept[block] = False
        self.on_evict(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block, live or cached."""
        for block in blocks:
            if not self._num_holders[block]:
                del self._cached[block]
            self._num_holders[block] += 1

    def keep(self, block: int) -> None:
        """Keep the content of a live block when its last holder lets go."""
        self._is_kept[block] = True

    def unkeep(self, block: int) -> None:
        """Undo `keep` of a live block."""
        self._is_kept[block] = False

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder off each block, the tail first, so that a shared prefix lives longest."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._is_kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._num_holders[block] > 1

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """Blocks that `release(blocks)` would make available."""
        return sum(self._num_holders[block] == 1 for block in blocks)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise EngineIntegrityError unless the holders of the blocks are exactly `tables`."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        for block, (num_holders, num_tables) in enumerate(
            zip(self._num_holders, expected, strict=True)
        ):
            if num_holders != num_tables:
                raise EngineIntegrityError(
                    f"block {block} counts {num_holders} holders and is in {num_tables} tables"
                )
        num_live = sum(count > 0 for count in expected)
        idle = [*self._free, *self._cached]
        if len(set(idle)) != len(idle) or any(expected[b] for b in idle):
            raise EngineIntegrityError("free and cached hold a block twice or a live block")
        if any(self._is_kept[b] for b in self._free):
            raise EngineIntegrityError("a block whose content is kept is free")
        if not all(self._is_kept[b] for b in self._cached):
            raise EngineIntegrityError("a block whose content is not kept is cached")
        if len(idle) + num_live != self.num_blocks:
            raise EngineIntegrityError(
                f"{self.num_free} free + {num_live} live + {self.num_cached} cached blocks "
                f"are not {self.num_blocks}"
            )
