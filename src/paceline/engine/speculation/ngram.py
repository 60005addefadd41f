"""n-gram look-up: what followed the last time that the text ended like this (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from paceline.engine.speculation.base import Draft, Forecast
from paceline.engine.speculation.history import History
from paceline.engine.speculation.index import MAX_MATCH, NgramIndex

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

_NUM_LENGTHS = MAX_MATCH + 1


class NgramProposer:
    """Copies from prompt, answer and the tenant's earlier answers what followed the longest match
    of the text's end; of equal ones the text's own counts.

    The kind of a guess is the length of the match that it continues, those guessed before it
    included: long matches are right more often. Matches in earlier answers are kinds of their own.
    """

    num_kinds = 2 * _NUM_LENGTHS

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._indexes: dict[int, NgramIndex] = {}  # by number of the sequence
        self._history = History()

    def prior(self, kind: int) -> float:
        length = kind % _NUM_LENGTHS
        return length / (length + 4)

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        index = self._indexes.get(seq.number)
        if index is None:
            index = self._indexes[seq.number] = NgramIndex(len(seq.token_ids))
        index.extend(seq.token_ids)
        limit = min(limit, self._max_tokens)
        num_matched, tokens = index.look_up(seq.token_ids, limit)
        first_kind = 0
        if num_matched < MAX_MATCH:
            tenant = seq.request.cache_salt
            earlier, follow = self._history.look_up(tenant, seq.token_ids, limit)
            if earlier > num_matched:
                num_matched, tokens, first_kind = earlier, follow, _NUM_LENGTHS
        kinds = [first_kind + min(num_matched + i, MAX_MATCH) for i in range(len(tokens))]
        return Forecast(kinds=kinds, tokens=tokens)

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        return [Draft(forecast.tokens[:length]) for _, forecast, length in wanted]

    def round_s(self, num_seqs: int) -> float:
        return 0.0

    def release(self, seq: Sequence) -> None:
        if self._indexes.pop(seq.number, None) is not None:
            self._history.add(seq.request.cache_salt, seq.token_ids[seq.num_prompt :])

    def close(self) -> None:
        self._indexes.clear()
        self._history = History()
