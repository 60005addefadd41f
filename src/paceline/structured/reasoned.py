"""ReasonedGrammar: a structure that binds what a model says, and leaves free what it thinks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engine.masks import U32
from paceline.structured.grammar import Grammar, GrammarState
from paceline.text.reasoning import Opening, ThinkTokens


class ReasonedGrammar(Grammar):
    """`grammar` from the end of the thinking on; None: only `budget` binds.

    Within the block every token may come but those that would end the answer before it is given.
    After `budget` tokens of it the block is closed.
    """

    def __init__(
        self,
        grammar: Grammar | None,
        opening: Opening,
        tokens: ThinkTokens,
        *,
        eos_ids: Sequence[int],
        budget: int | None = None,
    ) -> None:
        self._grammar = grammar
        self._opening = opening
        self._tokens = tokens
        self._eos_ids = np.asarray(eos_ids, np.int64)
        self._budget = budget

    def start(self, *, may_end_early: bool) -> GrammarState:
        inner = None if self._grammar is None else self._grammar.start(may_end_early=may_end_early)
        return ReasonedState(inner, self._opening, self._tokens, self._eos_ids, self._budget)


class ReasonedState(GrammarState):
    """How far one answer has come. `inner` is the state of what is said, None if it is free."""

    def __init__(
        self,
        inner: GrammarState | None,
        opening: Opening,
        tokens: ThinkTokens,
        eos_ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
        budget: int | None,
    ) -> None:
        self._inner = inner
        self._at = opening
        self._tokens = tokens
        self._eos_ids = eos_ids
        self._num_left = budget

    def fill(self, mask: U32) -> None:
        if self._at is Opening.BEGUN:
            if self._num_left is not None and self._num_left <= 0:
                mask[:] = 0
                _allow(mask, self._tokens.end)
                return
            mask[:] = ~np.uint32(0)
            bits = ~(np.uint32(1) << (self._eos_ids % 32).astype(np.uint32))
            np.bitwise_and.at(mask, self._eos_ids // 32, bits)
            return
        if self._inner is None:
            mask[:] = ~np.uint32(0)
        else:
            self._inner.fill(mask)
        if self._at is Opening.MAY_BEGIN:
            _allow(mask, self._tokens.begin)

    def forced(self, limit: int) -> list[int]:
        """Return what the structure forces; nothing where the model may think first."""
        if self._at is not Opening.OVER or self._inner is None:
            return []
        return self._inner.forced(limit)

    def commit(self, token_id: int) -> bool:
        if self._at is Opening.MAY_BEGIN:
            if token_id == self._tokens.begin:
                self._at = Opening.BEGUN
                return False
            self._at = Opening.OVER
        if self._at is Opening.BEGUN:
            if self._num_left is not None:
                self._num_left -= 1
            if token_id == self._tokens.end:
                self._at = Opening.OVER
            return False
        return self._inner is not None and self._inner.commit(token_id)


def _allow(mask: U32, token_id: int) -> None:
    mask[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
