"""BlockPool: ref-counted blocks of the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class EngineIntegrityError(AssertionError):
    """The books of the engine do not close: a bug, never a user's mistake."""


class BlockPool:
    """Who holds which KV block. A block is free (no holder), or live (one holder or more).

    `num_cached` counts blocks without a holder whose content is kept for reuse. The books close:
    free + live + cached == total.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the last one is taken first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_live(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks of one holder each. Precondition: `count <= num_free`."""
        if count > len(self._free):
            raise EngineIntegrityError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder off each block, the tail first, so that a shared prefix lives longest."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        return self._num_holders[block] > 1

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """Blocks that `release(blocks)` would make free."""
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
        if len(set(self._free)) != len(self._free) or any(expected[b] for b in self._free):
            raise EngineIntegrityError("the free list holds a block twice or a live block")
        if len(self._free) + num_live + self.num_cached != self.num_blocks:
            raise EngineIntegrityError(
                f"{len(self._free)} free + {num_live} live + {self.num_cached} cached blocks "
                f"are not {self.num_blocks}"
            )
