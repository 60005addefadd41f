"""Either: a sequence drafts in the one of two ways that promises more in this step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.engine.speculation.base import Draft, Forecast, Proposer

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence


class Either:
    """Forecasts in both ways; which is proposed is up to the pace.

    `free` guesses at no cost, `paid` at some. The kinds of `paid` are counted after those of
    `free`, so a forecast tells by its kinds whose it is.
    """

    def __init__(self, free: Proposer, paid: Proposer) -> None:
        self._free = free
        self._paid = paid
        self.num_kinds = free.num_kinds + paid.num_kinds

    def prior(self, kind: int) -> float:
        num_free = self._free.num_kinds
        return self._free.prior(kind) if kind < num_free else self._paid.prior(kind - num_free)

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        free = self._free.forecast(seq, limit, budget_s)
        paid = self._paid.forecast(seq, limit, budget_s)
        paid = replace(paid, kinds=[kind + self._free.num_kinds for kind in paid.kinds])
        if not free.kinds:
            return paid
        return replace(free, instead=paid) if paid.kinds else free

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        is_free = [forecast.kinds[0] < self._free.num_kinds for _, forecast, _ in wanted]
        free = self._free.propose([w for w, free in zip(wanted, is_free, strict=True) if free])
        paid_wanted = [w for w, free in zip(wanted, is_free, strict=True) if not free]
        paid = self._paid.propose(paid_wanted) if paid_wanted else []
        drafts = iter(free), iter(paid)
        return [next(drafts[not free]) for free in is_free]

    def round_s(self, num_seqs: int) -> float:
        return self._paid.round_s(num_seqs)

    def release(self, seq: Sequence) -> None:
        self._free.release(seq)
        self._paid.release(seq)

    def close(self) -> None:
        self._free.close()
        self._paid.close()
