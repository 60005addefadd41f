"""Grammar: a compiled structure. GrammarState: how far one answer has come in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.engine.masks import U32
from paceline.errors import PacelineError, ParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# What llguidance says where a bound of its work is met; its stop reasons do not tell that apart.
_LIMIT = re.compile(r"max is|too complex|too large|too many|limit|fuel")


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

        Raises ParameterError where the grammar turns out to be too complex, PacelineError for a
        token that may not come.
        """
        matcher = self._matcher
        if not matcher.consume_token(token_id):
            problem = " ".join(matcher.get_error().split())[:300]
            if _LIMIT.search(problem):
                raise ParameterError(
                    f"the structure of the answer is too complex, simplify it: {problem}",
                    param="structured",
                )
            raise PacelineError(f"the structure of the answer failed: {problem}")
        return matcher.is_stopped()
