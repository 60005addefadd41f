"""Grammar: a compiled structure. GrammarState: how far one answer has come in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.engine.masks import U32
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A structure that is compiled for one vocabulary. Many answers may follow it at once."""

    def __init__(self, matcher: LLMatcher, *, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_ids = np.asarray(eos_ids, np.int64)

    def start(self, *, may_end_early: bool) -> GrammarState:
        """Return the state of an answer that has no tokens yet.

        Without `may_end_early` the end token is not offered as long as anything else may follow.
        """
        ends = self._eos_ids[:0] if may_end_early else self._eos_ids
        return GrammarState(self._matcher.deep_copy(), ends)


class GrammarState:
    """What one answer may go on with. No two of its methods are called at the same time."""

    def __init__(self, matcher: LLMatcher, withheld: npt.NDArray[np.int64]) -> None:
        self._matcher = matcher
        self._words = withheld // 32
        self._bits = ~(np.uint32(1) << (withheld % 32).astype(np.uint32))

    def fill(self, mask: U32) -> None:
        """Write a bit for each token, set if it may come next, to `mask` [W]. Frees the GIL."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if len(self._words):
            np.bitwise_and.at(mask, self._words, self._bits)

    def forced(self, limit: int) -> list[int]:
        """Return the tokens that come next, at most `limit`, as far as each is the only choice.

        One that ends the answer is left out: nothing follows it that would need its row.
        """
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if tokens:
            ahead = self._matcher.deep_copy()
            if not ahead.consume_tokens(tokens):
                return []
            if ahead.is_stopped():
                tokens.pop()
        return tokens

    def commit(self, token_id: int) -> bool:
        """Take a chosen token; return True if nothing can follow it.

        Raises PacelineError for a token that may not come, or where the limits of the grammar's
        complexity were met.
        """
        matcher = self._matcher
        if not matcher.consume_token(token_id):
            problem = " ".join(matcher.get_error().split())
            raise PacelineError(f"the structure of the answer failed: {problem[:300]}")
        return matcher.is_stopped()
