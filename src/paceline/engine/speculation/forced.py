"""Forced tokens: where a structure leaves no choice, tokens share the step of the one before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.engine.speculation.base import Draft
from paceline.engine.speculation.rows import DraftRows
from paceline.policies.base import Budget, Policy

if TYPE_CHECKING:
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence

log = logging.getLogger(__name__)


class Forcing:
    """Drafts that are no guesses: tokens whose masks allow nothing else.

    Their K and V are needed all the same, so they cost a row each and save a step each. They are
    chosen from their rows like any other token, under the same masks: a grammar that was wrong
    about them costs rows and changes nothing. Beside other sequences that decode they are as many
    as the policy would let a prompt compute.
    """

    def __init__(self, rows: DraftRows, policy: Policy, clock: Callable[[], int]) -> None:
        self.num_tokens = 0  # that came without a step of their own
        self._rows = rows
        self._policy = policy
        self._clock = clock
        self._drafted: list[Sequence] = []

    def extend(self, schedule: Schedule) -> None:
        """Add forced tokens to the step. One that scores a prompt has no rows of logits left."""
        begin_ns = self._clock()
        self._drafted = []
        drafts: list[tuple[Sequence, Draft]] = []
        if any(seq.unscored(n) for seq, n in schedule.chunks):
            return
        budget = Budget(
            self._rows.num_left(schedule),
            num_decodes=schedule.num_tokens - schedule.num_prefill_tokens - 1,
            num_prefill=schedule.num_prefill_tokens,
        )
        for seq, n in schedule.chunks:
            limit = 0 if seq.grammar is None else self._rows.limit(seq, n)
            if limit > 0:
                limit = min(limit, self._policy.quota(seq, budget), budget.num_left)
            tokens = _forced(seq, limit) if limit > 0 else []
            length = self._rows.take(seq, len(tokens)) if tokens else 0
            if length > 0:
                drafts.append((seq, Draft(tokens[:length], is_forced=True)))
                budget.num_left -= length
                budget.num_prefill += length
        if drafts:
            self._drafted = [seq for seq, _ in drafts]
            self._rows.attach(schedule, drafts)
            schedule.draft_ns = self._clock() - begin_ns

    def settle(self) -> None:
        """Keep the rows of the tokens that came."""
        for seq in self._drafted:
            assert seq.draft is not None
            self.num_tokens += len(seq.draft.path)
            self._rows.settle(seq)
        self._drafted = []


def _forced(seq: Sequence, limit: int) -> list[int]:
    assert seq.grammar is not None
    try:
        return seq.grammar.forced(limit)
    except (
        BaseException
    ):  # a panic of native code is no Exception; its mask will tell what is wrong
        log.exception("request %s: its grammar cannot tell what it forces", seq.request.id)
        return []
