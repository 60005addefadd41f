"""Speculator: lengthens a step by drafts, and keeps of them what turned out right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.engine.sequence import State
from paceline.engine.speculation.acceptance import Acceptance
from paceline.engine.speculation.base import (
    MAX_DRAFTED,
    MAX_NODES,
    Draft,
    Forecast,
    Offer,
    Pace,
    Proposer,
)
from paceline.engine.speculation.goodput import Goodput
from paceline.engine.speculation.stats import SpecStats

if TYPE_CHECKING:
    from paceline.config import EngineConfig
    from paceline.engine.block_pool import BlockPool
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence

logger = logging.getLogger(__name__)

_FORGET, _FORGET_ALL = 0.9, 0.99  # of the acceptance of one sequence, and of all together


class _Candidate(Struct):
    """A sequence that decodes in this step, and what could be drafted for it."""

    seq: Sequence
    forecast: Forecast  # the one that was chosen
    offer: Offer  # the same, as the pace sees it
    others: list[Forecast]
    num_known: int  # tokens before the step


def create_speculator(
    proposer: Proposer,
    pace: Pace | None,
    pool: BlockPool,
    config: EngineConfig,
    copy_slots: Callable[[Seq[int], Seq[int]], None],
    clock: Callable[[], int],
) -> Speculator:
    """Return the speculator of an engine; without a pace drafts are as long as pays."""
    return Speculator(
        proposer,
        pace or Goodput(),
        pool=pool,
        block_size=config.block_size,
        max_tokens=config.max_batched_tokens,
        copy_slots=copy_slots,
        clock=clock,
    )


class Speculator:
    """Drafts for the sequences of a step that decode, and learns from what became of them.

    A draft lives for one step. Its rows follow the last known token's, their K and V go into blocks
    that nobody holds and that are given back after the step, so drafts preempt nobody.
    """

    def __init__(
        self,
        proposer: Proposer,
        pace: Pace,
        *,
        pool: BlockPool,
        block_size: int,
        max_tokens: int,
        copy_slots: Callable[[Seq[int], Seq[int]], None],
        clock: Callable[[], int],
    ) -> None:
        self.stats = SpecStats.empty()
        self._proposer: Proposer | None = proposer
        self._pace = pace
        self._pool = pool
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._copy_slots = copy_slots
        self._clock = clock
        self._all = Acceptance(proposer.num_kinds, proposer.prior, forget=_FORGET_ALL)
        self._of: dict[int, Acceptance] = {}  # by number of the sequence
        self._candidates: list[_Candidate] = []
        self._propose_ns = 0  # of the step, for guesses that are not free
        self._setup_s = 0.0  # of that, as it was forecast

    def extend(self, schedule: Schedule) -> None:
        """Add drafts to the step. A proposer that fails is not asked again."""
        begin_ns = self._clock()
        self._candidates, self._propose_ns, self._setup_s = [], 0, 0.0
        if self._proposer is None:
            return
        try:
            self._extend(schedule, self._proposer)
        except Exception:
            logger.exception("drafting failed: the engine goes on without")
            for candidate in self._candidates:
                self._give_back(candidate.seq)
                candidate.seq.draft = None
            with suppress(Exception):
                self._proposer.close()
            self._proposer, self._candidates = None, []
        schedule.draft_ns = self._clock() - begin_ns

    def _extend(self, schedule: Schedule, proposer: Proposer) -> None:
        num_left = min(self._max_tokens - schedule.num_tokens, MAX_DRAFTED)
        num_rows, num_prefill = schedule.num_tokens, schedule.num_prefill_tokens
        if num_left <= 0 or not self._pace.is_open(num_rows, num_prefill):
            return
        budget_s = self._pace.budget_s
        for seq, n in schedule.chunks:
            if n != 1 or seq.siblings or seq.num_computed + 1 != len(seq.token_ids):
                continue
            # The step's own token comes after the draft's last one.
            limit = min(num_left, MAX_NODES, seq.max_len - len(seq.token_ids) - 1)
            if limit > 0:
                forecast = proposer.forecast(seq, limit, budget_s)
                if forecast.kinds:
                    self._candidates.append(self._candidate(seq, forecast, num_rows, proposer))
        if not self._candidates:
            return
        offers = [candidate.offer for candidate in self._candidates]
        lengths = self._pace.lengths(offers, num_rows, num_prefill, proposer.round_s)
        wanted = []
        for candidate, length in zip(self._candidates, lengths, strict=True):
            length = min(length, len(candidate.forecast.kinds), num_left)
            length = self._take_blocks(candidate.seq, length)
            if length > 0:
                num_left -= length
                wanted.append((candidate.seq, candidate.forecast, length))
                self.stats.num_expected += sum(accumulate(candidate.offer.chances[:length], mul))
        if wanted:
            begin_ns = self._clock()
            drafts = proposer.propose(wanted)
            if not all(forecast.is_free for _, forecast, _ in wanted):
                self._propose_ns = self._clock() - begin_ns
                self._setup_s = sum(forecast.setup_s for _, forecast, _ in wanted)
            self._attach(schedule, wanted, drafts)

    def _candidate(
        self, seq: Sequence, forecast: Forecast, num_rows: int, proposer: Proposer
    ) -> _Candidate:
        """Return what is drafted for `seq` if anything is: the forecast that promises most."""
        forecasts = [forecast]
        while forecasts[-1].instead is not None:
            forecasts.append(forecasts[-1].instead)
        offers = [self._offer(seq, forecast) for forecast in forecasts]
        best = 0
        if len(offers) > 1:
            best = self._pace.better(offers, num_rows, proposer.round_s)
        chosen = forecasts.pop(best)
        return _Candidate(seq, chosen, offers[best], forecasts, len(seq.token_ids))

    def _offer(self, seq: Sequence, forecast: Forecast) -> Offer:
        acceptance = self._of.get(seq.number, self._all)
        return Offer(
            chances=[acceptance.chance(kind) for kind in forecast.kinds],
            is_free=forecast.is_free,
            setup_s=forecast.setup_s,
            num_left=seq.max_len - len(seq.token_ids),
        )

    def _take_blocks(self, seq: Sequence, length: int) -> int:
        """Give `seq` blocks that nobody holds; return how many of `length` guesses have a place."""
        table, size = seq.block_table, self._block_size
        num_missing = -(-(len(seq.token_ids) + length) // size) - len(table)
        table.extend(self._pool.allocate(max(min(num_missing, self._pool.num_available), 0)))
        return min(length, len(table) * size - len(seq.token_ids))

    def _attach(
        self, schedule: Schedule, wanted: Seq[tuple[Sequence, Forecast, int]], drafts: Seq[Draft]
    ) -> None:
        drafted: dict[int, int] = {}
        for (seq, _, length), draft in zip(wanted, drafts, strict=True):
            if draft.tokens:
                assert len(draft.tokens) <= length, "the draft is longer than its place"
                seq.draft = draft
                seq.num_drafted += len(draft.tokens)
                drafted[seq.number] = len(draft.tokens)
        schedule.chunks = [
            *((seq, n) for seq, n in schedule.chunks if seq.number not in drafted),
            *((seq, 1 + drafted[seq.number]) for seq, _, _ in wanted if seq.number in drafted),
        ]
        schedule.num_drafted = sum(drafted.values())
        schedule.num_tokens += schedule.num_drafted

    def settle(self, schedule: Schedule, seconds: float) -> None:
        """Keep what was right, forget the rest. `seconds` are the step's, without the drafting."""
        num_accepted = 0
        for seq, _ in schedule.chunks:
            draft = seq.draft
            if draft is None:
                continue
            num_accepted += len(draft.path)
            self.stats.count(draft.depths(), len(draft.path))
            if seq.state is State.RUNNING:
                self._keep(seq, draft)
        for candidate in self._candidates:
            self._learn(candidate, candidate.forecast, candidate.seq.draft)
            for forecast in candidate.others:
                self._learn(candidate, forecast, None)
            self._give_back(candidate.seq)
            candidate.seq.draft = None
        self._candidates = []
        draft_s = self._propose_ns / 1e9
        if not schedule.num_prefill_tokens:
            num_plain = schedule.num_tokens - schedule.num_drafted
            self.stats.count_step(num_plain, schedule.num_drafted, draft_s)
        self._pace.observe(
            num_rows=schedule.num_tokens,
            num_drafted=schedule.num_drafted,
            num_accepted=num_accepted,
            num_prefill=schedule.num_prefill_tokens,
            seconds=seconds,
            draft_s=draft_s,
            setup_s=self._setup_s,
        )

    def _keep(self, seq: Sequence, draft: Draft) -> None:
        """Make the rows of the path part of the sequence: they follow the last known token."""
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

    def _give_back(self, seq: Sequence) -> None:
        """Free the blocks behind the last known token."""
        num_kept = -(-len(seq.token_ids) // self._block_size)
        if seq.state is State.RUNNING and len(seq.block_table) > num_kept:
            self._pool.release(seq.block_table[num_kept:])
            del seq.block_table[num_kept:]
            seq.table_epoch += 1

    def _learn(self, candidate: _Candidate, forecast: Forecast, draft: Draft | None) -> None:
        """Compare a forecast with the tokens that came, as far as they can tell."""
        seq = candidate.seq
        for i, kind in enumerate(forecast.kinds):
            position = candidate.num_known + i
            if draft is not None and i < len(draft.path):
                is_right = True
            elif position >= len(seq.token_ids):
                return
            elif i < len(forecast.tokens):
                is_right = forecast.tokens[i] == seq.token_ids[position]
            elif draft is not None and draft.has_children(draft.end):
                is_right = False
            else:
                return
            self._all.observe(kind, is_right)
            if seq.state is State.RUNNING:  # one that ended is forgotten already
                self._acceptance(seq).observe(kind, is_right)
            if not is_right:
                return

    def _acceptance(self, seq: Sequence) -> Acceptance:
        if seq.number not in self._of:
            assert self._proposer is not None
            self._of[seq.number] = Acceptance(
                self._proposer.num_kinds, self._all.chance, forget=_FORGET
            )
        return self._of[seq.number]

    def release(self, seq: Sequence) -> None:
        """`seq` has ended. Idempotent."""
        self._of.pop(seq.number, None)
        if self._proposer is not None:
            self._proposer.release(seq)

    def close(self) -> None:
        """Free what the proposer holds. Idempotent."""
        if self._proposer is not None:
            self._proposer.close()
