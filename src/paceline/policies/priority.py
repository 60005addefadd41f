"""Lower `Request.priority` first, then order of submission; tenants take turns."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.policies.base import Budget, parse_options
from paceline.policies.turns import Turns

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence


class Options(Struct, frozen=True):
    """None."""


class Priority:
    """A waiting sequence takes blocks and seats from running ones of lower importance."""

    def __init__(self) -> None:
        self._turns = Turns()

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now_ns: int) -> list[Sequence]:
        return sorted(self._turns.order(waiting, running), key=lambda seq: seq.request.priority)

    def quota(self, seq: Sequence, budget: Budget) -> int:
        return budget.num_left

    def observe(self, num_tokens: int, forward_s: float) -> None:
        pass


def create(options: Mapping[str, str]) -> Priority:
    parse_options(Options, "priority", options)
    return Priority()
