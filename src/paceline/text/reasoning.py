"""Reasoning: what a model thinks before it answers, told apart from what it says.

A model that reasons writes `<think>…</think>` and then its answer. Some chat templates begin the
block in the prompt, and some write an empty one there, which switches thinking off.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

THINK_BEGIN, THINK_END = "<think>", "</think>"
SWITCH = "enable_thinking"  # Qwen3's variable of a chat template; others have none
_BLANKS = " \t\r\n"
_TAIL = 16  # tokens of a prompt that hold a marker at its end, with the blanks behind it


class Opening(enum.Enum):
    """Where an answer begins, and later where it has come to."""

    MAY_BEGIN = enum.auto()  # with a block, or with words
    BEGUN = enum.auto()  # within a block
    LANDING = enum.auto()  # behind a block, before any words
    OVER = enum.auto()  # with words


class Thought(Struct, frozen=True):
    """What the model thinks before it answers."""

    text: str


class ThinkTokens(Struct, frozen=True):
    """The tokens that are the markers, in a vocabulary that has one for each."""

    begin: int
    end: int


def reasons(template: str) -> bool:
    """Say whether a model with this chat template thinks before it answers."""
    return THINK_END in template


def opening_of(prompt: Iterable[int], tokenizer: Tokenizer) -> Opening:
    """Return where the answer to a prompt begins, of a model that reasons."""
    tail = tokenizer.decode(list(prompt)[-_TAIL:], skip_special=False).rstrip(_BLANKS)
    if tail.endswith(THINK_BEGIN):
        return Opening.BEGUN
    return Opening.OVER if tail.endswith(THINK_END) else Opening.MAY_BEGIN


def think_tokens(tokenizer: Tokenizer) -> ThinkTokens | None:
    """Return the tokens of the markers, None where they are spelled by several."""
    begin, end = (
        tokenizer.encode(marker, add_special=False, parse_special=True)
        for marker in (THINK_BEGIN, THINK_END)
    )
    return ThinkTokens(begin[0], end[0]) if len(begin) == len(end) == 1 else None


def hidden_ids(special: Mapping[str, int]) -> frozenset[int]:
    """Return the special tokens whose text is not shown: the markers are read from the text."""
    return frozenset(i for text, i in special.items() if text not in (THINK_BEGIN, THINK_END))


class ThoughtReader:
    """Takes an answer's text bit by bit; returns (thought, said) as soon as they are certain.

    However the text is cut, the joined results are the same. Line breaks beside the markers belong
    to neither, as in the templates that write earlier turns. A block that is not closed is thought
    to its end.
    """

    def __init__(self, opening: Opening) -> None:
        self.has_begun = opening is Opening.BEGUN
        self._at = opening
        self._pending = ""
        self._is_first = True  # nothing of the block was told yet

    @property
    def is_over(self) -> bool:
        """Whether all that is still to come is said."""
        return self._at in (Opening.LANDING, Opening.OVER)

    def feed(self, text: str) -> tuple[str, str]:
        self._pending += text
        if self._at is Opening.MAY_BEGIN:
            self._begin()
        thought = self._thought() if self._at is Opening.BEGUN else ""
        if self._at is Opening.LANDING:
            self._pending = self._pending.lstrip("\n")
            if self._pending:
                self._at = Opening.OVER
        said = ""
        if self._at is Opening.OVER:
            said, self._pending = self._pending, ""
        return thought, said

    def finish(self, *, is_cut: bool) -> tuple[str, str]:
        """Return what was held back. `is_cut`: the answer was to go on, half a marker is none."""
        rest, self._pending = self._pending, ""
        is_thought = self._at is Opening.BEGUN
        num_held = _overlap(rest, THINK_END if is_thought else THINK_BEGIN)
        if is_cut and num_held > 1:
            rest = rest[:-num_held]
        if not is_thought:
            return "", rest
        return (rest.strip("\n") if self._is_first else rest.rstrip("\n")), ""

    def _begin(self) -> None:
        rest = self._pending.lstrip(_BLANKS)
        if rest.startswith(THINK_BEGIN):
            self._at, self._pending = Opening.BEGUN, rest[len(THINK_BEGIN) :]
            self.has_begun = True
        elif not THINK_BEGIN.startswith(rest):
            self._at = Opening.OVER

    def _thought(self) -> str:
        """Return what is certain of the block. What may be beside its end is held back."""
        end = self._pending.find(THINK_END)
        is_closed = end >= 0
        if not is_closed:
            end = len(self._pending) - _overlap(self._pending, THINK_END)
        words = self._pending[:end].rstrip("\n")
        rest = self._pending[end + len(THINK_END) if is_closed else len(words) :]
        if self._is_first:
            words = words.lstrip("\n")
            self._is_first = not words
        self._pending = rest
        if is_closed:
            self._at = Opening.LANDING
        return words


class ThoughtCount:
    """Counts the tokens of a block, its markers included, by their bytes."""

    def __init__(self, opening: Opening, tokenizer: Tokenizer) -> None:
        self._reader = ThoughtReader(opening)
        self._tokenizer = tokenizer
        self._num_seen = 0

    def feed(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._reader.is_over:
                return
            self._num_seen += 1
            piece = self._tokenizer.token_bytes(token_id, skip_special=False)
            self._reader.feed(piece.decode("latin-1"))  # the markers are ASCII

    @property
    def num_tokens(self) -> int:
        return self._num_seen if self._reader.has_begun else 0


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
