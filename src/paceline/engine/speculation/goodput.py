"""Goodput: draft lengths that give the most tokens a second, and a bound on what they may lose."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from paceline.engine.speculation.base import MAX_DRAFTED
from paceline.engine.speculation.row_cost import RowCost

_MARGIN = 1.02  # a draft must promise so much more than none
_MIN_GAIN = 0.04  # tokens that a row must promise: fewer are not worth a thought
_CREDIT = 1.0  # plain steps that may be lost before anything was won
_MAX_CREDIT = 4.0  # a good hour does not pay for a bad one
_MAX_DEBT = 2.0  # an estimate that was far off is paid back in a few hundred steps
_TRICKLE = (
    0.005  # of each step may be lost for ever: the price of finding out that drafts pay again
)
_PROBES = (1, 1, 3, 1, 7)  # their lengths: a longer draft may pay where a short one does not
_FIRST_PROBE, _LAST_PROBE = 16, 512  # steps between probes; doubled when a probe loses
_PLAIN_AFTER = 48  # steps with drafts, one after the other, before one without: the measure of all
_PLAIN_AFTER_DOUBT = 4  # the same, while drafts do not clearly win
_SIZES = (1, 2, 3, 5, 7, 11, 15)  # drafts that are tried for whether right ones would pay at all
_LEARN = 0.2


class Goodput:
    """Chooses the lengths that maximise expected tokens over expected seconds of the step.

    Every step with drafts is booked against a plain one, in plain steps: won by tokens that were
    right, lost by the time that it took longer. When the balance cannot pay for a step's risk,
    there are no drafts, so whatever the estimates say no more than `_CREDIT` steps and `_TRICKLE`
    of the time are lost. A prompt in the step means no drafts: it fills the step by itself.
    """

    def __init__(self) -> None:
        self._cost = RowCost()
        self._round_s = 0.0  # to draft one token deeper
        self._balance = _CREDIT
        self._num_idle = 0  # steps since drafts were last made
        self._num_drafting = 0  # steps since there were none
        self._probe_after = _FIRST_PROBE
        self._is_probe = False
        self._num_probes = 0

    @property
    def balance(self) -> float:
        """Plain steps won by drafts less those lost, within limits."""
        return self._balance

    def is_open(self, num_rows: int, num_prefill: int) -> bool:
        self._is_probe = False
        is_winning = self._balance > _MAX_CREDIT / 2
        is_due = self._num_drafting >= (_PLAIN_AFTER if is_winning else _PLAIN_AFTER_DOUBT)
        if num_prefill or is_due or self._balance <= 0 or not self._cost.is_known:
            return False
        if self._probe_length(num_rows):
            return True
        cost, row_s = self._cost, self._cost.seconds(num_rows) / num_rows / _MARGIN
        return any(cost.seconds(num_rows + n) < row_s * (num_rows + n) for n in _SIZES)

    def lengths(self, chances: Seq[Seq[float]], num_rows: int, num_prefill: int) -> list[int]:
        none = [0] * len(chances)
        if not chances or not self.is_open(num_rows, num_prefill):
            return none
        lengths = self._best(chances, num_rows)
        probe = self._probe_length(num_rows)
        if any(lengths) or not probe:
            return lengths
        likely = max(range(len(chances)), key=lambda i: chances[i][0] if chances[i] else 0.0)
        none[likely] = min(probe, len(chances[likely]))
        self._is_probe = none[likely] > 0
        return none

    def observe(self, *, num_rows: int, num_drafted: int, depth: int, num_accepted: int,
                num_prefill: int, seconds: float, draft_s: float) -> None:  # fmt: skip
        if num_prefill:
            return
        if depth:
            round_s = draft_s / depth
            self._round_s += (round_s - self._round_s) * (_LEARN if self._round_s else 1)
        if num_drafted and self._cost.is_known:
            num_plain = num_rows - num_drafted
            plain_s = self._cost.seconds(num_plain)
            # An interruption is not the draft's fault.
            spent_s = min(seconds, 2 * self._cost.at_most(num_rows)) + draft_s
            won = num_accepted / num_plain + 1 - spent_s / plain_s
            self._balance += won
            self._num_idle = 0
            self._num_drafting += 1
            if self._is_probe:
                self._num_probes += 1
                self._probe_after = (
                    _FIRST_PROBE if won > 0 else min(2 * self._probe_after, _LAST_PROBE)
                )
        else:
            self._num_idle += 1
            self._num_drafting = 0
        self._balance = min(max(self._balance, -_MAX_DEBT) + _TRICKLE, _MAX_CREDIT)
        self._cost.observe(num_rows, seconds)

    def _probe_length(self, num_rows: int) -> int:
        """Return the length of the draft that is tried now for what it shows; 0: none."""
        length = _PROBES[self._num_probes % len(_PROBES)]
        is_due = self._num_idle >= self._probe_after
        return length if is_due and self._risk(num_rows, length, length) <= self._balance else 0

    def _best(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]:
        """Return the best lengths: the likeliest tokens first, as long as goodput grows.

        A token's gain is the chance that it and all before it are right; gains fall along a draft,
        so taking the largest next gain is optimal for every number of drafted tokens.
        """
        cost, lengths = self._cost, [0] * len(chances)
        heap = [(-row[0], i) for i, row in enumerate(chances) if row]
        heapq.heapify(heap)
        tokens = float(num_rows)
        best_rate = _MARGIN * tokens / cost.seconds(num_rows)
        order: list[int] = []  # the sequence of each drafted token
        num_best = depth = 0
        while heap and len(order) < MAX_DRAFTED and heap[0][0] < -_MIN_GAIN:
            gain, i = heap[0]
            tokens -= gain
            order.append(i)
            lengths[i] += 1
            depth = max(depth, lengths[i])
            if lengths[i] < len(chances[i]):
                heapq.heapreplace(heap, (gain * chances[i][lengths[i]], i))
            else:
                heapq.heappop(heap)
            rate = tokens / (cost.seconds(num_rows + len(order)) + depth * self._round_s)
            if rate > best_rate and self._risk(num_rows, len(order), depth) <= self._balance:
                best_rate, num_best = rate, len(order)
        best = [0] * len(chances)
        for i in order[:num_best]:
            best[i] += 1
        return best

    def _risk(self, num_rows: int, num_drafted: int, depth: int) -> float:
        """Return the plain steps that are lost if every drafted token is wrong."""
        seconds = self._cost.at_most(num_rows + num_drafted) + depth * self._round_s
        return seconds / self._cost.seconds(num_rows) - 1
