"""DraftRows: the places of a draft's rows in a step, and in the KV cache while it runs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from paceline.engine.sequence import State
from paceline.engine.speculation.base import MAX_DRAFTED, MAX_NODES, Draft

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.block_pool import BlockPool
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence


class DraftRows:
    """Lengthens steps by drafts. A draft lives for one step.

    Its rows follow the last known token's; their K and V go into blocks that nobody holds and that
    are given back after the step, so drafts preempt nobody.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        copy_slots: Callable[[Seq[int], Seq[int]], None],
    ) -> None:
        self._pool = pool
        self._block_size = config.block_size
        self._max_tokens = config.max_batched_tokens
        self._copy_slots = copy_slots

    def num_left(self, schedule: Schedule) -> int:
        """Return how many rows of drafts the step has room for."""
        return min(self._max_tokens - schedule.num_tokens, MAX_DRAFTED - schedule.num_drafted)

    def limit(self, seq: Sequence, num_tokens: int) -> int:
        """Return how long a draft of `seq` may be in a step that computes so many tokens of it."""
        if num_tokens != 1 or seq.siblings or seq.num_computed + 1 != len(seq.token_ids):
            return 0
        # The step's own token comes after the draft's last one.
        return min(MAX_NODES, seq.max_len - len(seq.token_ids) - 1)

    def take(self, seq: Sequence, length: int) -> int:
        """Give `seq` blocks that nobody holds; return how many of `length` guesses have a place."""
        table, size = seq.block_table, self._block_size
        num_missing = -(-(len(seq.token_ids) + length) // size) - len(table)
        table.extend(self._pool.allocate(max(min(num_missing, self._pool.num_available), 0)))
        return min(length, len(table) * size - len(seq.token_ids))

    def attach(self, schedule: Schedule, drafts: Seq[tuple[Sequence, Draft]]) -> int:
        """Add drafts that have their places to the step; return how many rows they are."""
        lengths = {seq.number: len(draft.tokens) for seq, draft in drafts}
        for seq, draft in drafts:
            seq.draft = draft
        schedule.chunks = [
            *((seq, n) for seq, n in schedule.chunks if seq.number not in lengths),
            *((seq, 1 + lengths[seq.number]) for seq, _ in drafts),
        ]
        num_rows = sum(lengths.values())
        schedule.num_drafted += num_rows
        schedule.num_tokens += num_rows
        return num_rows

    def settle(self, seq: Sequence) -> None:
        """Make the rows that were right part of the sequence, and free the blocks of the others."""
        if seq.state is State.RUNNING:
            if seq.draft is not None:
                self._keep(seq, seq.draft)
            self.give_back(seq)
        seq.draft = None

    def _keep(self, seq: Sequence, draft: Draft) -> None:
        first = seq.num_computed  # the slot after the row of the last known token
        src, dst = [], []
        for i, node in enumerate(draft.path):
            if node != i:
                src.append(self._slot(seq, first + node))
                dst.append(self._slot(seq, first + i))
        if src:
            self._copy_slots(src, dst)
        seq.num_computed += len(draft.path)

    def _slot(self, seq: Sequence, position: int) -> int:
        size = self._block_size
        return seq.block_table[position // size] * size + position % size

    def give_back(self, seq: Sequence) -> None:
        """Free the blocks behind the last known token."""
        num_kept = -(-len(seq.token_ids) // self._block_size)
        if seq.state is State.RUNNING and len(seq.block_table) > num_kept:
            self._pool.release(seq.block_table[num_kept:])
            del seq.block_table[num_kept:]
            seq.table_epoch += 1
