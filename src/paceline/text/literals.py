"""Literals: finds added tokens in text, which are matched whole before anything is merged."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence


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

    def starts(self, text: str) -> Iterator[int]:
        """Yield where a word begins, overlapping ones too."""
        position = 0
        while self._candidates and (found := self._candidates.search(text, position)):
            begin = found.start()
            position = begin + 1
            lengths = self._lengths[found.group()]
            if any(text[begin : begin + length] in self.ids for length in lengths):
                yield begin


class Markers:
    """Finds control markers, whole or begun, in text that must not hold any."""

    __slots__ = ("_backward", "_first_chars", "_forward", "_last_chars", "_longest", "_words")

    def __init__(self, words: Iterable[str]) -> None:
        self._forward = sorted(word for word in words if len(word) > 1)
        self._backward = sorted(word[::-1] for word in self._forward)
        self._first_chars = frozenset(word[0] for word in self._forward)
        self._last_chars = frozenset(word[-1] for word in self._forward)
        self._longest = max(map(len, self._forward), default=0)
        self._words = Literals(dict.fromkeys(self._forward, 0))

    def cuts(self, text: str) -> list[int]:
        """Return sorted positions such that any marker within `text` has one inside it.

        So has a marker that other text completes, if two of its characters stand at an end of
        `text`. Example: for "<|end|>", "a<|end|>" gives [2] and "<|e" gives [1].
        """
        cuts = {begin + 1 for begin in self._words.starts(text)}
        for length in range(2, min(self._longest, len(text) + 1)):
            end = text[len(text) - length :]
            if end[0] in self._first_chars and _begins_any(end, self._forward):
                cuts.add(len(text) - length + 1)
            if text[length - 1] in self._last_chars and _begins_any(
                text[length - 1 :: -1], self._backward
            ):
                cuts.add(1)
        return sorted(cuts)


def _begins_any(text: str, words: Sequence[str]) -> bool:
    """True where one of the sorted words begins with `text`."""
    at = bisect_left(words, text)
    return at < len(words) and words[at].startswith(text)


def _spans(begin: int, end: int, cuts: Sequence[int]) -> bool:
    """True where a cut lies strictly inside [begin, end)."""
    next_cut = bisect_right(cuts, begin)
    return next_cut < len(cuts) and cuts[next_cut] < end
