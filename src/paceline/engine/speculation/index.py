"""NgramIndex: where in a text each pair of tokens came before, and what followed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

MIN_MATCH = 2  # tokens
MAX_MATCH = 15  # a match is measured up to here
_MAX_TRIED = 12  # earlier places that a look-up compares
_MIN_SLOTS, _MAX_SLOTS = 2**10, 2**16  # of the hash table: at most 256 KiB a sequence
_FACTOR = 0x9E3779B1


class NgramIndex:
    """Where each pair of tokens ended before, the latest place first.

    A hash table holds the latest place of a pair, `_earlier` the place before each place (the
    chains of LZ77). Both are flat arrays; pairs that share a slot are told apart by their tokens.
    """

    def __init__(self, num_tokens: int) -> None:
        num_slots = _MIN_SLOTS
        while num_slots < min(2 * num_tokens, _MAX_SLOTS):
            num_slots *= 2
        self._mask = num_slots - 1
        self._latest = array("i", [-1]) * num_slots
        self._earlier = array("i")  # of the pair that ends at a position; -1: none

    def extend(self, tokens: Seq[int]) -> None:
        """Enter all pairs of `tokens` but the last. Precondition: they begin with those before."""
        latest, earlier, mask = self._latest, self._earlier, self._mask
        begin = len(earlier)
        if begin >= len(tokens) - 1:
            return
        previous = tokens[begin - 1] if begin else 0
        for position in range(begin, len(tokens) - 1):
            token = tokens[position]
            slot = (previous * _FACTOR ^ token) & mask
            earlier.append(latest[slot])
            latest[slot] = position
            previous = token

    def look_up(self, tokens: Seq[int], limit: int) -> tuple[int, list[int]]:
        """Return the longest match of the end of `tokens`, and what followed it: `limit` tokens.

        What follows a match that overlaps the end repeats.
        """
        num_matched, place = self.find(tokens, tokens)
        if not num_matched:
            return 0, []
        period = len(tokens) - 1 - place
        follow = list(tokens[place + 1 : place + 1 + limit])
        while len(follow) < limit:
            follow.append(follow[len(follow) - period])
        return num_matched, follow

    def find(self, tokens: Seq[int], text: Seq[int]) -> tuple[int, int]:
        """Return the longest match of the end of `tokens` in `text`, and where it ends.

        `text` is what was entered. Of equal matches the latest counts; 0 long is none.
        """
        end = len(tokens) - 1
        if end < MIN_MATCH:
            return 0, -1
        last, before = tokens[end], tokens[end - 1]
        place = self._latest[(before * _FACTOR ^ last) & self._mask]
        best_length, best_place = 0, -1
        for _ in range(_MAX_TRIED):
            if place < 1:
                break
            if text[place] == last and text[place - 1] == before:
                length = 2
                most = min(MAX_MATCH, place + 1, len(tokens))
                while length < most and text[place - length] == tokens[end - length]:
                    length += 1
                if length > best_length:
                    best_length, best_place = length, place
                    if length >= MAX_MATCH:
                        break
            place = self._earlier[place]
        return best_length, best_place
