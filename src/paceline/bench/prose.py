"""Prose: texts of a wanted number of tokens, from common words or from a file."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

from paceline.bench.lengths import CHARS_PER_TOKEN
from paceline.errors import ParameterError

TokenCounter = Callable[[str], int]

_MAX_ADJUSTMENTS = 8


class Prose:
    """Makes texts. The same random state gives the same text, whatever was made before."""

    def __init__(
        self, *, count_tokens: TokenCounter | None = None, corpus: str | None = None
    ) -> None:
        self._count = count_tokens
        self._corpus = corpus

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Return a text of `num_tokens` tokens: exactly (or as near as words allow) by the
        tokenizer if there is one, else by estimate."""
        if self._corpus is not None:
            return self._passage(rng, num_tokens)
        words = rng.choices(common_words(), k=num_tokens)
        text = " ".join(words)
        if self._count is None:
            return text
        for _ in range(_MAX_ADJUSTMENTS):
            off = num_tokens - self._count(text)
            if off == 0:
                break
            words = (
                words + rng.choices(common_words(), k=off) if off > 0 else words[:off] or words[:1]
            )
            text = " ".join(words)
        return text

    def _passage(self, rng: random.Random, num_tokens: int) -> str:
        assert self._corpus is not None
        num_chars = max(1, round(num_tokens * CHARS_PER_TOKEN))
        if num_chars > len(self._corpus):
            raise ParameterError(
                f"the text has {len(self._corpus)} characters, {num_tokens} tokens need about "
                f"{num_chars}: give a longer file or shorter inputs"
            )
        start = rng.randrange(len(self._corpus) - num_chars + 1)
        for _ in range(_MAX_ADJUSTMENTS if self._count else 0):
            assert self._count is not None
            count = self._count(self._corpus[start : start + num_chars])
            if count == num_tokens:
                break
            wanted = max(1, round(num_chars * num_tokens / max(count, 1)))
            num_chars = min(wanted, len(self._corpus) - start)
        return self._corpus[start : start + num_chars]


@cache
def common_words() -> list[str]:
    """Return nouns that, with a space before them, are one token in the vocabularies in use.

    A text of n of them has about n tokens even where no tokenizer is named.
    """
    return files("paceline.bench").joinpath("words.txt").read_text(encoding="utf-8").split()


def read_corpus(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as text: {error}") from None


def token_counter(model: str) -> TokenCounter:
    """Return a counter of tokens by the tokenizer of a model, named as for `paceline run`."""
    from paceline.catalog import resolve
    from paceline.text.tokenizer import build_tokenizer
    from paceline.weights.checkpoint import open_checkpoint

    tokenizer = build_tokenizer(open_checkpoint(resolve(model)).tokenizer)
    return lambda text: len(tokenizer.encode(text, add_special=False))
