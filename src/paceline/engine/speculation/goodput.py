"""Goodput: draft lengths that give the most tokens a second, and a bound on what they may lose."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

from paceline.engine.speculation.base import MAX_DRAFTED, Offer, RoundCost
from paceline.engine.speculation.row_cost import RowCost

_MARGIN = 1.02  # a draft must promise so much more than none
_UNEVEN = 0.18  # and in a large batch so much beyond that: who ends early saves the others a row
_MIN_GAIN = 0.04  # tokens that a row must promise: fewer are not worth a thought
_CREDIT = 1.0  # plain steps that may be lost before anything was won
_MAX_CREDIT = 4.0  # a good hour does not pay for a bad one
_MAX_DEBT = 2.0  # an estimate that was far off is paid back in a few hundred steps
_TRICKLE = (
    0.005  # of each step may be lost for ever: the price of finding out that drafts pay again
)
_FUND = 3.0  # plain steps that guesses which cost time may lose before anything was won
_MAX_FUND = 24.0  # and after a good hour: what drafts won beyond `_MAX_CREDIT`
_FUND_TRICKLE = 0.004  # of each step
_HORIZON = 64  # tokens in which a set-up must pay for itself
_PROBES = (1, 1, 3, 1, 7)  # their lengths: a longer draft may pay where a short one does not
_FIRST_PROBE, _LAST_PROBE = 16, 512  # steps between probes; doubled when a probe loses
_LOOK = 0.005  # of the time may go into finding out that nothing is worth drafting
_MAX_REST = 16  # steps without a look: where text begins to repeat, drafts come so much later
_PLAIN_AFTER = 48  # steps with drafts, one after the other, before one without: the measure of all
_PLAIN_AFTER_DOUBT = 4  # the same, while drafts do not clearly win
_SIZES = (1, 2, 3, 5, 7, 11, 15)  # drafts that are tried for whether right ones would pay at all


class Goodput:
    """Chooses the lengths that maximise expected tokens over expected seconds of the step.

    Every step with drafts is booked against a plain one, in plain steps: won by tokens that were
    right, lost by the time that it took longer. When the balance cannot pay for a step's risk,
    there are no drafts, so whatever the estimates say no more than `_CREDIT` steps and `_TRICKLE`
    of the time are lost. A prompt in the step means no drafts: it fills the step by itself.
    Looking for drafts takes time, too: where none was worth it, up to `_MAX_REST` steps pass before
    the next look, so that it takes no more than `_LOOK` of the time, or a look in every 17th step.

    Guesses that cost time must be paid before they can win, set-ups long before. A fund pays for
    set-ups, with what drafts won lately, and for such guesses where the balance cannot. It has a
    bound of the same kind: `_FUND` steps, `_FUND_TRICKLE` of the time, and what drafts won before,
    up to `_MAX_FUND`.

    `known` are rows of steps and their seconds, measured before.
    """

    def __init__(self, known: Seq[tuple[int, float]] = ()) -> None:
        self._cost = RowCost(known)
        self._balance = _CREDIT
        self._fund = _FUND
        self._num_idle = 0  # steps since drafts were last made
        self._num_drafting = 0  # steps since there were none
        self._num_resting = 0  # steps to come without a look
        self._probe_after = _FIRST_PROBE
        self._is_probe = False
        self._num_probes = 0
        self._num_rows = 1  # of the latest step that was asked about, without drafts

    @property
    def balance(self) -> float:
        """Plain steps won by drafts less those lost, within limits."""
        return self._balance

    @property
    def fund(self) -> float:
        """Plain steps that set-ups and guesses which cost time may take now."""
        return self._fund

    @property
    def budget_s(self) -> float:
        if not self._cost.is_known:
            return 0.0
        # One sequence of n can win an n-th of a step's tokens, so so much is risked to find out.
        num_steps = self._fund / self._num_rows + max(self._balance - _CREDIT, 0.0)
        return num_steps * self._cost.seconds(self._num_rows)

    def is_open(self, num_rows: int, num_prefill: int) -> bool:
        self._is_probe = False
        self._num_rows = num_rows
        is_winning = self._balance > _MAX_CREDIT / 2
        is_due = self._num_drafting >= (_PLAIN_AFTER if is_winning else _PLAIN_AFTER_DOUBT)
        if num_prefill or is_due or self._num_resting:
            return False
        if self._balance <= 0 or not self._cost.is_known:
            return False
        if self._probe_length(num_rows):
            return True
        cost, row_s = self._cost, self._cost.seconds(num_rows) / num_rows / _margin(num_rows)
        return any(cost.seconds(num_rows + n) < row_s * (num_rows + n) for n in _SIZES)

    def better(self, offers: Seq[Offer], num_rows: int, round_s: RoundCost) -> int:
        if not self._cost.is_known:
            return 0
        rates = [
            self._gain(offer, num_rows, round_s) if self._is_worth(offer, num_rows, round_s) else -1
            for offer in offers
        ]
        return rates.index(max(rates))

    def lengths(
        self, offers: Seq[Offer], num_rows: int, num_prefill: int, round_s: RoundCost
    ) -> list[int]:
        none = [0] * len(offers)
        if not offers or not self.is_open(num_rows, num_prefill):
            return none
        lengths = self._best(offers, num_rows, round_s)
        if any(lengths):
            return lengths
        likely = max(range(len(offers)), key=lambda i: [*offers[i].chances, 0.0][0])
        offer = offers[likely]
        length = min(
            self._probe_length(num_rows, 0.0 if offer.is_free else round_s(1)), len(offer.chances)
        )
        if length and offer.setup_s <= self.budget_s:
            none[likely] = length
            self._is_probe = True
        return none

    def observe(self, *, num_rows: int, num_drafted: int, num_accepted: int, num_prefill: int,
                seconds: float, draft_s: float, setup_s: float,
                look_s: float) -> None:  # fmt: skip
        if num_prefill:
            return
        if (num_drafted or draft_s) and self._cost.is_known:
            num_plain = num_rows - num_drafted
            plain_s = self._cost.seconds(num_plain)
            # An interruption is not the draft's fault.
            spent_s = min(seconds, 2 * self._cost.at_most(num_rows)) + look_s
            spent_s += max(draft_s - setup_s, 0.0)
            won = num_accepted / num_plain + 1 - spent_s / plain_s
            self._balance += won
            if draft_s:
                self._fund -= min(setup_s, draft_s) / plain_s
                self._even_out()
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
            num_paying = math.ceil(look_s / (_LOOK * seconds)) if seconds > 0 else 0
            self._num_resting = max(self._num_resting - 1, min(num_paying - 1, _MAX_REST), 0)
        self._close_books()
        self._cost.observe(num_rows, seconds)

    def _even_out(self) -> None:
        """Let each account pay what the other owes."""
        moved = min(max(-self._balance, 0.0), max(self._fund, 0.0))
        moved -= min(max(-self._fund, 0.0), max(self._balance, 0.0))
        self._balance += moved
        self._fund -= moved

    def _close_books(self) -> None:
        """Let both accounts grow by their share of a step; what is won beyond one fills the other.

        A trickle alone never fills the fund beyond what it began with.
        """
        balance = max(self._balance, -_MAX_DEBT) + _TRICKLE
        self._balance = min(balance, _MAX_CREDIT)
        if self._fund < _FUND:
            self._fund = min(self._fund + _FUND_TRICKLE, _FUND)
        self._fund = min(self._fund + max(balance - _TRICKLE - _MAX_CREDIT, 0.0), _MAX_FUND)

    def _probe_length(self, num_rows: int, round_s: float = 0.0) -> int:
        """Return the length of the draft that is tried now for what it shows; 0: none."""
        length = _PROBES[self._num_probes % len(_PROBES)]
        is_due = self._num_idle >= self._probe_after
        return length if is_due and self._can_risk(num_rows, length, length * round_s) else 0

    def _gain(self, offer: Offer, num_rows: int, round_s: RoundCost) -> float:
        """Return how much faster tokens come with the best draft of this offer alone, less 1."""
        cost = self._cost
        plain_rate = num_rows / cost.seconds(num_rows)
        each_s = 0.0 if offer.is_free else round_s(1)
        best, tokens, chance = 0.0, float(num_rows), 1.0
        for length, next_chance in enumerate(offer.chances, 1):
            chance *= next_chance
            if chance < _MIN_GAIN:
                break
            tokens += chance
            rate = tokens / (cost.seconds(num_rows + length) + length * each_s)
            best = max(best, rate / plain_rate - 1)
        return best

    def _is_worth(self, offer: Offer, num_rows: int, round_s: RoundCost) -> bool:
        """Say whether the fund has the offer's set-up, and a few dozen tokens would pay it back."""
        if not offer.setup_s:
            return True
        gain = max(self._gain(offer, num_rows, round_s) + _MARGIN - _margin(num_rows), 0.0)
        num_steps = min(offer.num_left, _HORIZON)
        saved_s = num_steps * self._cost.seconds(num_rows) * gain / (1 + gain)
        return _MARGIN * offer.setup_s < saved_s and offer.setup_s <= self.budget_s

    def _best(self, offers: Seq[Offer], num_rows: int, round_s: RoundCost) -> list[int]:
        """Return the best lengths: the likeliest tokens first, as long as goodput grows.

        A token's gain is the chance that it and all before it are right; gains fall along a draft,
        so taking the largest next gain is optimal for every number of drafted tokens that cost
        alike. Those of a model are made in rounds, one guess for each sequence that goes so deep.
        """
        cost, lengths = self._cost, [0] * len(offers)
        setup_s = 0.0
        heap = [
            (-offer.chances[0], i)
            for i, offer in enumerate(offers)
            if offer.chances and self._is_worth(offer, num_rows, round_s)
        ]
        heapq.heapify(heap)
        tokens = float(num_rows)
        best_rate = _margin(num_rows) * tokens / cost.seconds(num_rows)
        order: list[int] = []  # the sequence of each drafted token
        widths: list[int] = []  # the guesses of each round that are not free
        num_best, draft_s = 0, 0.0
        while heap and len(order) < MAX_DRAFTED and heap[0][0] < -_MIN_GAIN:
            gain, i = heap[0]
            offer, depth = offers[i], lengths[i]
            if not depth and setup_s + offer.setup_s > self.budget_s:
                heapq.heappop(heap)
                continue
            setup_s += 0.0 if depth else offer.setup_s
            tokens -= gain
            order.append(i)
            lengths[i] += 1
            if not offer.is_free:
                widths.extend([0] * (depth + 1 - len(widths)))
                draft_s += round_s(widths[depth] + 1)
                draft_s -= round_s(widths[depth]) if widths[depth] else 0.0
                widths[depth] += 1
            if lengths[i] < len(offer.chances):
                heapq.heapreplace(heap, (gain * offer.chances[lengths[i]], i))
            else:
                heapq.heappop(heap)
            rate = tokens / (cost.seconds(num_rows + len(order)) + draft_s)
            if rate > best_rate and self._can_risk(num_rows, len(order), draft_s, setup_s):
                best_rate, num_best = rate, len(order)
        best = [0] * len(offers)
        for i in order[:num_best]:
            best[i] += 1
        return best

    def _can_risk(
        self, num_rows: int, num_drafted: int, draft_s: float, setup_s: float = 0.0
    ) -> bool:
        """Say whether the books can pay for the step if every drafted token is wrong."""
        plain_s = self._cost.seconds(num_rows)
        risk = (self._cost.at_most(num_rows + num_drafted) + draft_s) / plain_s - 1
        fund = self._fund - setup_s / plain_s if draft_s else 0.0
        return risk <= self._balance + fund


def _margin(num_rows: int) -> float:
    """Return by what factor tokens must come faster with drafts in a step of so many sequences.

    A token more is an n-th of a step as long as all get ahead alike, or others wait for the seat.
    Where some do and the rest go on without them, a step of fewer sequences costs little less.
    """
    return _MARGIN + _UNEVEN * (1 - 1 / num_rows)
