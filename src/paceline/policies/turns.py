"""Turns: order of submission, fair between tenants."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

_OUTPUT_WEIGHT = 2  # of a generated token, to one of a prompt
_EXPECTED_OUTPUT = 128  # tokens of a request that has not begun

_by_number = attrgetter("number")


class Turns:
    """Who runs stays ahead; those that wait go by whose tenant was served least.

    Of one tenant they go by submission. One that waits may have come before one that runs: a choice
    that found no seat, a call that waits for a prefix. It takes the next seat, not a taken one.

    The virtual token counter of Sheng et al. 2024 ("Fairness in Serving Large Language Models"): a
    tenant is charged what it is served, prompt tokens that were computed and generated ones. Who
    comes, or comes back, begins no lower than the least charged of those that are here, so being
    away earns nothing. While there is one tenant nothing is counted.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._charged: dict[int, tuple[Sequence, int]] = {}  # by number: all that are here

    def order(self, waiting: Seq[Sequence], running: Seq[Sequence]) -> list[Sequence]:
        everyone = (*running, *waiting)
        present = {seq.request.tenant for seq in everyone}
        if len(present) < 2 and self._served.keys() <= present:
            self._served.clear()
            self._charged.clear()
            return sorted(running, key=_by_number) + sorted(waiting, key=_by_number)
        self._charge(everyone)
        self._join(present)
        return sorted(running, key=_by_number) + self._in_turns(waiting)

    def _charge(self, everyone: Seq[Sequence]) -> None:
        """Charge tenants for what was done since the last step; forget sequences that are gone."""
        is_new = not self._served
        for number, (seq, charged) in list(self._charged.items()):
            done = _done(seq)
            self._served[seq.request.tenant] += done - charged
            self._charged[number] = seq, done
        here = {seq.number for seq in everyone}
        for number in self._charged.keys() - here:
            del self._charged[number]
        for seq in everyone:
            if seq.number not in self._charged:
                self._charged[seq.number] = seq, _done(seq) if is_new else 0

    def _join(self, present: set[str]) -> None:
        here = [self._served[tenant] for tenant in present if tenant in self._served]
        least = min(here, default=0.0)
        for tenant in present:
            self._served.setdefault(tenant, least)
        for tenant in self._served.keys() - present:
            if self._served[tenant] <= least:  # where it would begin again anyway
                del self._served[tenant]

    def _in_turns(self, waiting: Seq[Sequence]) -> list[Sequence]:
        lines: dict[str, list[Sequence]] = defaultdict(list)
        for seq in sorted(waiting, key=_by_number, reverse=True):
            lines[seq.request.tenant].append(seq)
        heads = [(self._served[t], line[-1].number, t) for t, line in lines.items()]
        heapq.heapify(heads)
        order = []
        while heads:
            served, _, tenant = heads[0]
            line = lines[tenant]
            seq = line.pop()
            order.append(seq)
            if line:
                heapq.heapreplace(heads, (served + _expected(seq), line[-1].number, tenant))
            else:
                heapq.heappop(heads)
        return order


def _done(seq: Sequence) -> int:
    """Return what a sequence was served; a prompt counts once for all choices, when it begins."""
    if not seq.scheduled_ns:
        return 0
    prompt = seq.num_prompt - (seq.num_cached or 0) if seq.index == 0 else 0
    return prompt + _OUTPUT_WEIGHT * seq.num_output


def _expected(seq: Sequence) -> int:
    num_output = min(seq.max_len - len(seq.token_ids), _EXPECTED_OUTPUT)
    return seq.num_prompt + _OUTPUT_WEIGHT * num_output
