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
from paceline.engine.speculation.base import Draft, Forecast, Offer, Pace, Proposer
from paceline.engine.speculation.goodput import Goodput
from paceline.engine.speculation.rows import DraftRows
from paceline.engine.speculation.stats import SpecStats

if TYPE_CHECKING:
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
    proposer: Proposer, pace: Pace | None, rows: DraftRows, clock: Callable[[], int]
) -> Speculator:
    """Return the speculator of an engine; without a pace drafts are as long as pays."""
    return Speculator(proposer, pace or Goodput(), rows=rows, clock=clock)


class Speculator:
    """Drafts for the sequences of a step that decode, and learns from what became of them."""

    def __init__(
        self, proposer: Proposer, pace: Pace, *, rows: DraftRows, clock: Callable[[], int]
    ) -> None:
        self.stats = SpecStats.empty()
        self._proposer: Proposer | None = proposer
        self._pace = pace
        self._rows = rows
        self._clock = clock
        self._all = Acceptance(proposer.num_kinds, proposer.prior, forget=_FORGET_ALL)
        self._of: dict[int, Acceptance] = {}  # by number of the sequence
        self._candidates: list[_Candidate] = []
        self._num_drafted = 0  # rows of the step
        self._propose_ns = 0  # of the step, for guesses that are not free
        self._setup_s = 0.0  # of that, as it was forecast
        self._look_ns = 0  # of the step, for all else

    def extend(self, schedule: Schedule) -> None:
        """Add drafts to the step. A proposer that fails is not asked again."""
        begin_ns = self._clock()
        self._candidates, self._num_drafted = [], 0
        self._propose_ns, self._setup_s, self._look_ns = 0, 0.0, 0
        if self._proposer is None:
            return
        try:
            self._extend(schedule, self._proposer)
        except Exception:
            logger.exception("drafting failed: the engine goes on without")
            for candidate in self._candidates:
                candidate.seq.draft = None
                self._rows.give_back(candidate.seq)
            with suppress(Exception):
                self._proposer.close()
            self._proposer, self._candidates = None, []
        took_ns = self._clock() - begin_ns
        schedule.draft_ns += took_ns
        self._look_ns = took_ns - self._propose_ns

    def _extend(self, schedule: Schedule, proposer: Proposer) -> None:
        num_left = self._rows.num_left(schedule)
        num_rows, num_prefill = schedule.num_tokens, schedule.num_prefill_tokens
        if num_left <= 0 or not self._pace.is_open(num_rows, num_prefill):
            return
        budget_s = self._pace.budget_s
        for seq, n in schedule.chunks:
            limit = min(num_left, self._rows.limit(seq, n))
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
            length = self._rows.take(candidate.seq, length)
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
            for (_, _, length), draft in zip(wanted, drafts, strict=True):
                assert len(draft.tokens) <= length, "the draft is longer than its place"
            self._attach(
                schedule, [(seq, d) for (seq, _, _), d in zip(wanted, drafts, strict=True)]
            )

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

    def _attach(self, schedule: Schedule, drafts: Seq[tuple[Sequence, Draft]]) -> None:
        drafts = [(seq, draft) for seq, draft in drafts if draft.tokens]
        for seq, draft in drafts:
            seq.num_drafted += len(draft.tokens)
        self._num_drafted = self._rows.attach(schedule, drafts)

    def settle(self, schedule: Schedule, seconds: float) -> None:
        """Keep what was right, forget the rest. `seconds` are the step's, without the drafting."""
        num_accepted = 0
        for candidate in self._candidates:
            draft = candidate.seq.draft
            if draft is not None:
                num_accepted += len(draft.path)
                self.stats.count(draft.depths(), len(draft.path))
            self._learn(candidate, candidate.forecast, draft)
            for forecast in candidate.others:
                self._learn(candidate, forecast, None)
            self._rows.settle(candidate.seq)
        self._candidates = []
        draft_s = self._propose_ns / 1e9
        if not schedule.num_prefill_tokens:
            num_plain = schedule.num_tokens - self._num_drafted
            self.stats.count_step(num_plain, self._num_drafted, draft_s)
        self._pace.observe(
            num_rows=schedule.num_tokens,
            num_drafted=self._num_drafted,
            num_accepted=num_accepted,
            num_prefill=schedule.num_prefill_tokens,
            seconds=seconds,
            draft_s=draft_s,
            setup_s=self._setup_s,
            look_s=self._look_ns / 1e9,
        )

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
