"""Bottom-up merging of symbols by a rank of any kind: the loop of SentencePiece."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise

NO_MERGE = float("inf")
_SHORT = 48  # below this, scanning a list for its minimum beats a heap


def merge(symbols: list[str], rank: Callable[[str, str], float]) -> list[str]:
    """Join neighbours, lowest `rank(left, right)` first and leftmost among equals.

    Stops where every rank is NO_MERGE. O(n log n) for long inputs.
    Example: ["a", "b", "c"] with rank(b, c) = 0 and rank(a, b) = 1 gives ["a", "bc"].
    """
    if len(symbols) < _SHORT:
        return _merge_short(symbols, rank)
    return _merge_long(symbols, rank)


def _merge_short(symbols: list[str], rank: Callable[[str, str], float]) -> list[str]:
    parts = list(symbols)
    ranks = [rank(left, right) for left, right in pairwise(parts)]
    while ranks:
        best = min(ranks)
        if best == NO_MERGE:
            break
        i = ranks.index(best)
        parts[i] += parts.pop(i + 1)
        ranks.pop(i)
        if i:
            ranks[i - 1] = rank(parts[i - 1], parts[i])
        if i < len(ranks):
            ranks[i] = rank(parts[i], parts[i + 1])
    return parts


def _merge_long(symbols: list[str], rank: Callable[[str, str], float]) -> list[str]:
    parts = list(symbols)
    count = len(parts)
    before = list(range(-1, count - 1))
    after = [*range(1, count), -1]
    heap: list[tuple[float, int, str, str]] = []

    def offer(left: int, right: int) -> None:
        if left >= 0 and right >= 0:
            value = rank(parts[left], parts[right])
            if value != NO_MERGE:
                heapq.heappush(heap, (value, left, parts[left], parts[right]))

    for i in range(count - 1):
        offer(i, i + 1)
    while heap:
        _, left, left_text, right_text = heapq.heappop(heap)
        right = after[left]
        # An entry is stale once either side has been merged since it was pushed.
        if right < 0 or parts[left] != left_text or parts[right] != right_text:
            continue
        parts[left] += parts[right]
        parts[right] = ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        offer(before[left], left)
        offer(left, after[left])
    return [part for part in parts if part]
