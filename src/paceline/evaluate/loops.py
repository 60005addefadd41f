"""Loops: answers that end in the same few tokens again and again."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 4
MIN_TOKENS = 32


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Return the shortest period with which `token_ids` end, None where they end in no loop.

    A loop is a run of at most MAX_PERIOD tokens that stands MIN_REPEATS times or more at the end,
    and is MIN_TOKENS long in all: x x x x is none, a table of four equal rows of ten is.
    O(MAX_PERIOD * len(token_ids)).
    """
    for period in range(1, MAX_PERIOD + 1):
        needed = max(MIN_REPEATS * period, MIN_TOKENS)
        if needed > len(token_ids):
            continue
        tail = token_ids[-needed:]
        if tail[period:] == tail[:-period]:
            return period
    return None
