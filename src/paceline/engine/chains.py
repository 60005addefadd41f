"""Chain: the hashes by which the prefix cache knows the blocks of a sequence.

The hash of a block is of its tokens and of the block before it, so equal hashes mean equal tokens
from the sequence's start.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

from msgspec import Struct, field

TOKEN_BYTES = 4


class Chain(Struct, eq=False):
    """What the prefix cache knows of one sequence.

    `hashes` and `packed` are of its first full blocks, as many as were asked for.
    """

    root: bytes
    block_size: int
    hashes: list[bytes] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)  # token ids, four bytes each
    num_found: int = -1  # blocks that others had computed; -1: has not looked yet
    num_published: int = 0  # blocks of the table that the cache knows
    num_promised: int = 0  # blocks up to which the others may wait for this sequence
    num_seen: int = -1  # tokens computed when the last step was planned
    lookup_ns: int = 0  # in all, of the look-ups that led to an admission
    waits_since_ns: int = 0  # for a sequence ahead with the same prefix; 0: does not wait
    ended_waits_ns: int = 0

    def waited_until(self, now_ns: int) -> int:
        """Return how long the sequence has waited for others' prefixes in all."""
        return self.ended_waits_ns + (now_ns - self.waits_since_ns if self.waits_since_ns else 0)

    def parent(self, block_idx: int) -> bytes:
        return self.hashes[block_idx - 1] if block_idx else self.root

    def hash(self, token_ids: Seq[int], block_idx: int) -> bytes:
        """Return the hash of a full block, and of all before it, of these tokens."""
        size = self.block_size
        while len(self.hashes) <= block_idx:
            i = len(self.hashes)
            packed = pack(token_ids[i * size : (i + 1) * size])
            self.hashes.append(digest(self.parent(i) + packed))
            self.packed.append(packed)
        return self.hashes[block_idx]

    def fork(self) -> Chain:
        """Return that of a sequence with the same blocks, which has promised nothing."""
        return Chain(
            self.root, self.block_size, list(self.hashes), list(self.packed),
            num_found=self.num_published, num_published=self.num_published,
        )  # fmt: skip


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def pack(token_ids: Seq[int]) -> bytes:
    return array("i", token_ids).tobytes()
