"""First come, first served."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.policies.base import Budget, parse_options

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence


class Options(Struct, frozen=True):
    """None."""


class FCFS:
    """Order of submission; a sequence that catches up takes all the tokens that are left."""

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence], now_ns: int) -> list[Sequence]:
        return sorted((*running, *waiting), key=attrgetter("number"))

    def quota(self, seq: Sequence, budget: Budget) -> int:
        return budget.num_left

    def observe(self, num_tokens: int, forward_s: float) -> None:
        pass


def create(options: Mapping[str, str]) -> FCFS:
    parse_options(Options, "fcfs", options)
    return FCFS()
