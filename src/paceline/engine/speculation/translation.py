"""Translation: a sequence's text in the draft model's tokens, and guesses back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from paceline.text.tokenizer import Tokenizer

_TAIL = 4  # known tokens that guesses are encoded together with
_BROKEN = "\ufffd"  # part of a character


class Translation(Protocol):
    """Between two tokenizers. A bad translation makes bad guesses, never a bad text."""

    def to_draft(self, tokens: Seq[int], start: int) -> list[int]:
        """Return the draft model's tokens for the text of `tokens[start:]`."""

    def to_target(self, tokens: Seq[int], guessed: Seq[int]) -> list[int]:
        """Return the tokens that follow `tokens` if the draft model has `guessed` right."""


class SameTokens:
    """Both models read the same tokens."""

    def to_draft(self, tokens: Seq[int], start: int) -> list[int]:
        return list(tokens[start:])

    def to_target(self, tokens: Seq[int], guessed: Seq[int]) -> list[int]:
        return list(guessed)


class ByText:
    """The models have different tokenizers and meet in the text.

    Markers like `<|im_end|>` are the other model's marker where that has one of the same name, and
    ordinary text where not.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target = target
        self._draft = draft

    def to_draft(self, tokens: Seq[int], start: int) -> list[int]:
        text = self._target.decode(tokens[start:], skip_special=False, continuation=start > 0)
        return self._draft.encode(
            text.rstrip(_BROKEN), add_special=start == 0 and self._draft.adds_bos,
            parse_special=True,
        )  # fmt: skip

    def to_target(self, tokens: Seq[int], guessed: Seq[int]) -> list[int]:
        text = self._draft.decode(guessed, skip_special=False, continuation=True)
        text = text.partition(_BROKEN)[0]
        tail = list(tokens[-_TAIL:])
        known = self._target.decode(tail, skip_special=False)
        if not text or known.endswith(_BROKEN):
            return []
        ids = self._encode(known + text)
        # Where the guess would have become one token with the text before it, it is a token apart.
        return ids[len(tail) :] if ids[: len(tail)] == tail else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._target.encode(text, add_special=False, parse_special=True)


def translation(target: Tokenizer, draft: Tokenizer) -> Translation:
    """Return the translation between two models' tokenizers; the same one needs none."""
    return SameTokens() if draft.has_ids_of(target) else ByText(target, draft)
