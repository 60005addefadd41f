"""Pins: beginnings of prompts that stay in the KV cache until somebody lets go of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from msgspec import Struct

from paceline.engine.block_pool import BlockPool
from paceline.errors import ParameterError


class Unpin(Struct, frozen=True):
    """The wish that a pin is let go."""

    name: str


class Pins:
    """Holds the whole blocks of prompts, by name, so that nothing evicts them.

    Pins may hold half of the pool; a block that several hold counts once. They give way, the oldest
    first, where a sequence alone would not fit beside them: they make answers faster, and never
    impossible.
    """

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_blocks = pool.num_blocks // 2
        self._held: dict[str, list[int]] = {}

    def tokens(self) -> dict[str, int]:
        """Return how many tokens each pin holds. May be called from any thread."""
        return {name: len(blocks) * self._block_size for name, blocks in dict(self._held).items()}

    def tables(self) -> list[list[int]]:
        return list(self._held.values())

    def blocks(self, names: Container[str] | None = None) -> set[int]:
        """Return what the pins `names` hold, or all pins. May be called from any thread."""
        held = dict(self._held).items()
        return {block for name, own in held if names is None or name in names for block in own}

    def check(self, num_held: int, num_more: int) -> None:
        """Raise ParameterError unless so many tokens may be pinned beside those that are held."""
        limit = self._max_blocks * self._block_size
        if num_held + num_more > limit:
            raise ParameterError(
                f"the pins hold {num_held} tokens, and {num_more} more are beyond {limit}, half "
                "of the KV cache: unpin one, or raise --kv-memory",
                param="pin",
            )

    def hold(self, name: str, blocks: Sequence[int]) -> None:
        """Pin `blocks`, which somebody holds now, as far as the limit allows."""
        held = self.blocks()
        num_left = self._max_blocks - len(held)
        num_new = 0
        for i, block in enumerate(blocks):
            num_new += block not in held
            if num_new > num_left:
                blocks = blocks[:i]
                break
        blocks = list(blocks)
        if blocks and name not in self._held:
            self._pool.share(blocks)
            self._held[name] = blocks

    def drop(self, name: str) -> None:
        """Let go of a pin; what it held stays cached. Unknown names are ignored."""
        blocks = self._held.pop(name, None)
        if blocks is not None:
            self._pool.release(blocks)

    def drop_all(self) -> None:
        for name in list(self._held):
            self.drop(name)

    def give_way(self, num_blocks: int) -> None:
        """Let go of the oldest pins until so many blocks are available, or none is left."""
        while self._held and self._pool.num_available < num_blocks:
            self.drop(next(iter(self._held)))
