"""PromptRepeats: how much of a prompt an earlier one began with."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 32  # tokens; a shorter common beginning is none
_MAX_BLOCKS = 16_384  # that are remembered, the latest: about 2 MB


class PromptRepeats:
    """Remembers the beginnings of prompts, as hashes: no text, no token.

    It tells what a cache of prefixes could spare, and costs about 2 µs a block.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._seen: dict[int, None] = {}  # in the order of their last use
        self._max_blocks = max_blocks

    def see(self, token_ids: Sequence[int], *, salt: str = "") -> int:
        """Return how many leading tokens were seen before, in whole blocks, and remember all.

        Only prompts of the same `salt` are compared, as in the cache: nobody learns of others'.
        """
        seen = self._seen
        num_repeated, digest, is_repeat = 0, hash(salt), True
        for begin in range(0, len(token_ids) - _BLOCK + 1, _BLOCK):
            digest = hash((digest, *token_ids[begin : begin + _BLOCK]))
            is_repeat = is_repeat and digest in seen
            num_repeated += _BLOCK if is_repeat else 0
            seen.pop(digest, None)
            seen[digest] = None
        while len(seen) > self._max_blocks:
            del seen[next(iter(seen))]
        return num_repeated
