"""Literals: finds added tokens in text, which are matched whole before anything is merged."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence


class Literals:
    """Leftmost-longest search for fixed strings; O(characters), at most one try a distinct length.

    Text is searched for the first two characters of the words, which are few even where the words
    are thousands, and the lengths that occur behind such a pair are tried, longest first.
    """

    __slots__ = ("_candidates", "_lengths", "ids")

    def __init__(self, words: Mapping[str, int]) -> None:
        self.ids = dict(words)
        lengths: dict[str, set[int]] = {}
        for word in self.ids:
            lengths.setdefault(word[:2], set()).add(len(word))
        for start in lengths:
            if start[0] in self.ids:
                lengths[start].add(1)
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._candidates = re.compile("|".join(map(re.escape, starts))) if starts else None

    def find(self, text: str, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, id) of each match; none of them spans a position of sorted `cuts`."""
        if self._candidates is None:
            return
        position = 0
        while found := self._candidates.search(text, position):
            begin = found.start()
            position = begin + 1
            for length in self._lengths[found.group()]:
                token_id = self.ids.get(text[begin : begin + length])
                if token_id is not None and not _spans(begin, begin + length, cuts):
                    position = begin + length
                    yield begin, position, token_id
                    break


def _spans(begin: int, end: int, cuts: Sequence[int]) -> bool:
    """True where a cut lies strictly inside [begin, end)."""
    next_cut = bisect_right(cuts, begin)
    return next_cut < len(cuts) and cuts[next_cut] < end
