"""n-gram look-up: what followed the last time that the text ended like this (Saxena 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from paceline.engine.speculation.base import Draft, Forecast

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

_MIN_MATCH = 2  # tokens
_NUM_KINDS = 16  # a longer match counts as one of 15
_MAX_TRIED = 12  # earlier places that a look-up compares
_MIN_SLOTS, _MAX_SLOTS = 2**10, 2**16  # of the hash table: at most 256 KiB a sequence
_FACTOR = 0x9E3779B1


class NgramProposer:
    """Copies from prompt and answer: the tokens after the longest earlier match of the text's end.

    The kind of a guess is the length of the match that it continues, those guessed before it
    included: long matches are right more often.
    """

    num_kinds = _NUM_KINDS

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._indexes: dict[int, NgramIndex] = {}  # by number of the sequence

    def prior(self, kind: int) -> float:
        return kind / (kind + 4)

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        index = self._indexes.get(seq.number)
        if index is None:
            index = self._indexes[seq.number] = NgramIndex(len(seq.token_ids))
        index.extend(seq.token_ids)
        num_matched, tokens = index.look_up(seq.token_ids, min(limit, self._max_tokens))
        kinds = [min(num_matched + i, _NUM_KINDS - 1) for i in range(len(tokens))]
        return Forecast(kinds=kinds, tokens=tokens)

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        return [Draft(forecast.tokens[:length]) for _, forecast, length in wanted]

    def round_s(self, num_seqs: int) -> float:
        return 0.0

    def release(self, seq: Sequence) -> None:
        self._indexes.pop(seq.number, None)

    def close(self) -> None:
        self._indexes.clear()


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

        Of equal ones the latest counts. What follows a match that overlaps the end repeats. A match
        is measured up to the length that tells kinds apart.
        """
        end = len(tokens) - 1
        if end < _MIN_MATCH:
            return 0, []
        last, before = tokens[end], tokens[end - 1]
        place = self._latest[(before * _FACTOR ^ last) & self._mask]
        best_length, best_place = _MIN_MATCH - 1, -1
        for _ in range(_MAX_TRIED):
            if place < 1:
                break
            if tokens[place] == last and tokens[place - 1] == before:
                length = 2
                most = min(_NUM_KINDS - 1, place + 1)
                while length < most and tokens[place - length] == tokens[end - length]:
                    length += 1
                if length > best_length:
                    best_length, best_place = length, place
                    if length >= _NUM_KINDS - 1:
                        break
            place = self._earlier[place]
        if best_place < 0:
            return 0, []
        period = end - best_place
        follow = list(tokens[best_place + 1 : best_place + 1 + limit])
        while len(follow) < limit:
            follow.append(follow[len(follow) - period])
        return best_length, follow
