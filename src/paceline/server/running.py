"""RunningCalls: the calls that have not ended, and what is known of them by now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING

from paceline.server.calls import Call, Ended
from paceline.server.timeline import engine_id

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class RunningCalls:
    """Read and written on the event loop. Iterating gives `so_far` of each, oldest first."""

    def __init__(self, engine_of: Callable[[Call], Engine | None]) -> None:
        self._engine_of = engine_of
        self._calls: dict[int, Call] = {}  # by the object's id: a call has no name at first

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return (so_far(call, self._engine_of(call)) for call in self._calls.values())

    def add(self, call: Call) -> None:
        self._calls[id(call)] = call

    def remove(self, call: Call) -> None:
        self._calls.pop(id(call), None)

    def find(self, key: str) -> Call | None:
        """Return `so_far` of the latest call with this id or X-Request-Id."""
        for call in reversed(self._calls.values()):
            if key and key in (call.id, call.request_id):
                return so_far(call, self._engine_of(call))
        return None


def so_far(call: Call, engine: Engine | None) -> Call:
    """Return a copy of an open call in which the choices that still run in `engine` end now.

    A choice that waits for its prompt, which another one computes, is left out.
    """
    now_ns = time.monotonic_ns()
    choices: dict[int, Ended] = {}
    for prompt_idx in range(0 if engine is None else call.num_choices // call.n):
        assert engine is not None
        sequences = engine.running(engine_id(call.id, prompt_idx))
        waiting = {sibling.index for seq in sequences for sibling in seq.siblings}
        for seq in sequences:
            if seq.index not in waiting:
                ledger = None if seq.ledger is None else seq.ledger.so_far(now_ns)
                choices[prompt_idx * call.n + seq.index] = Ended(
                    None, seq.usage(), seq.timings(now_ns), ledger, now_ns
                )
    seen = copy(call)
    seen.choices = choices | call.choices
    return seen
