"""A bound on the duration of a step, so that a long prompt never stalls the other streams."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.errors import ParameterError
from paceline.policies.base import Budget, parse_options
from paceline.policies.turns import Turns

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

_FORGET = 0.95  # weight of a step's measurement one step later
_GROWTH = 2  # a step is at most so many times as large as the largest of late
_MIN_STEPS = 4  # measured steps before the fit is believed


class Options(Struct, frozen=True):
    """`floor` tokens of prefill go into every step, so that a prompt always moves on."""

    step_ms: float = 50.0
    floor: float = 16

    def __post_init__(self) -> None:
        if not 0 < self.step_ms < 1e6:
            raise ParameterError(f"step_ms is {self.step_ms}: it must be above 0", param="policy")
        if not 1 <= self.floor < 1e6:
            raise ParameterError(f"floor is {self.floor}: it must be at least 1", param="policy")


class SLO:
    """Order of submission, tenants in turns; prefill next to decodes gets what fits into `step_ms`.

    A step is taken to cost `base + per_token * num_tokens` seconds. Both are fitted by least
    squares over the measured steps with weights that fade, so the fit follows growing contexts.
    Where all steps of late are small their noise decides `per_token`, so a prompt begins with
    twice the tokens of the largest of them, and then with twice that. Before there is data, prefill
    next to decodes gets the floor.
    """

    def __init__(self, options: Options) -> None:
        self._turns = Turns()
        self._step_s = options.step_ms / 1e3
        self._floor = int(options.floor)
        self._num_steps = 0
        self._reach = 0.0  # tokens of the largest step of late: it fades as the sums do
        self._w = self._x = self._y = self._xx = self._xy = 0.0  # faded sums: 1, tokens, seconds …

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now_ns: int) -> list[Sequence]:
        return self._turns.order(waiting, running)

    def quota(self, seq: Sequence, budget: Budget) -> int:
        if not budget.num_decodes:
            return budget.num_left
        num_fitting = self.num_fitting() - budget.num_decodes
        return min(max(num_fitting, self._floor) - budget.num_prefill, budget.num_left)

    def observe(self, num_tokens: int, forward_s: float) -> None:
        self._num_steps += 1
        x, y = float(num_tokens), forward_s
        self._reach = max(x, self._reach * _FORGET)
        self._w = self._w * _FORGET + 1
        self._x = self._x * _FORGET + x
        self._y = self._y * _FORGET + y
        self._xx = self._xx * _FORGET + x * x
        self._xy = self._xy * _FORGET + x * y

    def num_fitting(self) -> int:
        """Return how many tokens a step of `step_ms` should hold; 0 before there is data."""
        if self._num_steps < _MIN_STEPS:
            return 0
        mean_x, mean_y = self._x / self._w, self._y / self._w
        var = self._xx / self._w - mean_x * mean_x
        slope = (self._xy / self._w - mean_x * mean_y) / var if var > 1e-9 * self._xx else 0.0
        if slope <= 0:  # steps of one size only: charge all of it to the tokens, which errs low
            slope = mean_y / mean_x
        base = max(mean_y - slope * mean_x, 0.0)
        fitting = (self._step_s - base) / slope if slope > 0 else 0.0
        return max(int(min(fitting, _GROWTH * self._reach)), 0)


def create(options: Mapping[str, str]) -> SLO:
    return SLO(parse_options(Options, "slo", options))
