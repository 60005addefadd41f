"""Shadows: what a draft model has read of the sequences, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from msgspec import Struct

from paceline.backends.base import F32, Backend, StepInput
from paceline.engine.block_pool import BlockPool
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import Sequence, State
from paceline.engine.speculation.row_cost import RowCost
from paceline.engine.step import StepBuilder

_NUM_SURE = 64  # questions about costs after the latest step that are answered by what it took
_DOUBT = 0.99  # how much of that is believed, a question later
_MIN_TRUST = 0.2


class Shadow(Struct, eq=False):
    """The draft model's copy of a sequence, from token `start` of the original on.

    `seq` is a sequence like any other, in the draft model's tokens. Its first `num_known` tokens
    are text, that of the original's first `num_original`; what follows are guesses.
    """

    seq: Sequence
    start: int
    num_known: int
    num_original: int

    def num_unseen(self, num_tokens: int) -> int:
        """Return about how many tokens it must read when the original has `num_tokens`.

        Guesses that it read count as right.
        """
        num_new = num_tokens - self.num_original
        return max(num_new + self.num_known - self.seq.num_computed, 1)


class Shadows:
    """Keeps the shadows of sequences within a pool of blocks, and runs the draft model over them.

    A shadow is a cache: dropping it loses time, never an answer. Those drafted for longest ago are
    dropped where blocks run out. What one has read, others find in a prefix cache.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        pool: BlockPool,
        builder: StepBuilder,
        block_size: int,
        max_tokens: int,
        clock_s: Callable[[], float],
    ) -> None:
        self.cost = RowCost()
        self._backend = backend
        self._pool = pool
        self._cache = PrefixCache(pool, block_size=block_size)
        self._builder = builder
        self._block_size = block_size
        self.max_tokens = max_tokens  # of a step
        self._clock_s = clock_s
        self._shadows: dict[int, Shadow] = {}  # by number of the original, the latest used last
        self._num_shadows = 0
        self._num_asked = 0  # since the latest step
        self.num_read = 0  # tokens that the draft model computed

    @property
    def num_live_blocks(self) -> int:
        """Blocks that shadows hold; the others are free or cached."""
        return self._pool.num_live

    def seconds(self, num_rows: int) -> float:
        """Return what a step of the draft model is expected to take.

        Costs that kept it from running were perhaps those of a bad moment: the longer it has not
        run, the less is asked for, until it runs and tells.
        """
        trust = max(_DOUBT ** max(self._num_asked - _NUM_SURE, 0), _MIN_TRUST)
        return self.cost.seconds(num_rows) * trust

    def get(self, number: int) -> Shadow | None:
        return self._shadows.get(number)

    def asked(self) -> None:
        """A sequence was offered a draft: of what comes of it `seconds` depends."""
        self._num_asked += 1

    def num_cached(self, original: Sequence, ids: list[int]) -> int:
        """Return how many of `ids`, the text of a shadow that is not there yet, are known."""
        return self._cache.match(self._new_seq(original, ids), 0).num_tokens

    def follow(
        self, original: Sequence, start: int, ids: list[int], num_ahead: int, keep: set[int]
    ) -> Shadow | None:
        """Return the shadow of `original` with the text `ids` and room for `num_ahead` guesses.

        None where the pool has no room beside the shadows of the sequences in `keep`.
        """
        shadow = self._shadows.pop(original.number, None)
        if shadow is not None and (shadow.start != start or not self._correct(shadow, ids)):
            self._release(shadow)
            shadow = None
        if shadow is None:
            shadow = self._open(original, start, ids, keep)
            if shadow is None:
                return None
        shadow.num_original = len(original.token_ids)
        self._shadows[original.number] = shadow
        if not self._grow(shadow, num_ahead, keep | {original.number}):
            return None
        return shadow

    def forward(self, chunks: list[tuple[Sequence, int]]) -> tuple[list[Sequence], F32]:
        """Compute n tokens of each shadow sequence; return those that are done and their logits.

        Precondition: chunks of one token come first.
        """
        begin_s = self._clock_s()
        step, done = self._builder.build(chunks)
        logits = self._backend.forward(step).logits
        for seq, n in chunks:
            seq.num_computed += n
        num_rows = len(step.tokens)
        self.num_read += num_rows
        self._num_asked = 0
        self.cost.observe(num_rows, self._clock_s() - begin_s)
        return done, logits

    def warm_up(self, sizes: Seq[int]) -> None:
        """Learn what steps of so many tokens cost. Precondition: there are no shadows yet."""
        for n in sizes:
            places = np.arange(n, dtype=np.int32)
            step = StepInput(
                tokens=np.zeros(n, np.int32),
                positions=places,
                slots=places,
                seqs=np.array([[0, n, 0]], np.int32),
                block_tables=np.arange(self._num_blocks(n), dtype=np.int32)[None],
                logit_rows=places[-1:],
            )
            seconds = []
            for _ in range(3):  # the first brings weights into memory
                begin_s = self._clock_s()
                self._backend.forward(step)
                seconds.append(self._clock_s() - begin_s)
            self.cost.observe(n, min(seconds))

    def drop(self, number: int) -> None:
        """Forget the shadow of a sequence. Idempotent."""
        shadow = self._shadows.pop(number, None)
        if shadow is not None:
            self._release(shadow)

    def close(self) -> None:
        """Free the draft model. Idempotent."""
        self._shadows.clear()
        self._backend.close()

    def check_integrity(self) -> None:
        """Raise EngineIntegrityError unless blocks and cache agree with the shadows."""
        seqs = [shadow.seq for shadow in self._shadows.values()]
        self._pool.check_integrity(seq.block_table for seq in seqs)
        self._cache.check_integrity([])

    def _new_seq(self, original: Sequence, ids: list[int]) -> Sequence:
        self._num_shadows += 1  # a number of its own: a table is known by it
        return Sequence(
            request=original.request,
            index=original.index,
            number=self._num_shadows,
            token_ids=list(ids),
            max_len=self._pool.num_blocks * self._block_size,
            sampler=original.sampler,
            decoder=original.decoder,
            matcher=None,
            ends={},
            arrival_ns=0,
        )

    def _open(
        self, original: Sequence, start: int, ids: list[int], keep: set[int]
    ) -> Shadow | None:
        seq = self._new_seq(original, ids)
        match = self._cache.match(seq, 0)
        self._pool.share(match.blocks)
        num_missing = self._num_blocks(len(ids)) - len(match.blocks)
        if not self._make_room(num_missing, keep):
            self._pool.release(match.blocks)
            return None
        seq.block_table.extend(match.blocks)
        seq.block_table.extend(self._pool.allocate(num_missing))
        if match.source is not None:
            self._backend.copy_blocks([match.source], [seq.block_table[len(match.blocks)]])
        seq.num_computed = match.num_tokens
        seq.state = State.RUNNING
        self._cache.admitted(seq, match)
        return Shadow(seq, start, len(ids), len(original.token_ids))

    def _correct(self, shadow: Shadow, ids: list[int]) -> bool:
        """Replace guesses by what came; False where text that is in the cache has changed.

        The last token is always computed again, for its logits.
        """
        seq = shadow.seq
        num_equal = _num_equal(seq.token_ids, ids)
        if num_equal < min(shadow.num_known, len(ids)) // self._block_size * self._block_size:
            return False
        seq.token_ids[num_equal:] = ids[num_equal:]
        seq.num_computed = min(seq.num_computed, num_equal, len(ids) - 1)
        shadow.num_known = len(ids)
        num_kept = self._num_blocks(len(ids))
        if len(seq.block_table) > num_kept:
            self._pool.release(seq.block_table[num_kept:])
            del seq.block_table[num_kept:]
            seq.table_epoch += 1
        self._cache.publish(seq)
        return True

    def _grow(self, shadow: Shadow, num_ahead: int, keep: set[int]) -> bool:
        """Give the shadow places for its text and all guesses but the last."""
        seq = shadow.seq
        num_missing = self._num_blocks(len(seq.token_ids) + num_ahead - 1) - len(seq.block_table)
        if not self._make_room(num_missing, keep):
            return False
        seq.block_table.extend(self._pool.allocate(max(num_missing, 0)))
        return True

    def _make_room(self, num_blocks: int, keep: set[int]) -> bool:
        for number in [number for number in self._shadows if number not in keep]:
            if self._pool.num_available >= num_blocks:
                break
            self.drop(number)
        return self._pool.num_available >= num_blocks

    def _release(self, shadow: Shadow) -> None:
        seq = shadow.seq
        del seq.token_ids[shadow.num_known :]
        seq.num_computed = min(seq.num_computed, shadow.num_known)
        self._cache.leaving(seq)
        self._pool.release(seq.block_table)
        seq.block_table.clear()
        seq.state = State.FINISHED

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _num_equal(a: Seq[int], b: Seq[int]) -> int:
    """Return how many leading tokens are equal; quick where one begins with the other."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
