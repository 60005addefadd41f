"""StreamDecoder turns token ids into text as they come; StopMatcher ends text at a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """Text of tokens one by one: the feeds and the flush joined are the decode of all ids.

    A character comes out once all its bytes are there. Bytes that are no UTF-8 become U+FFFD.
    """

    __slots__ = ("_decode", "_piece", "_strip")

    def __init__(self, piece: Callable[[int], bytes], *, strip_leading_space: bool) -> None:
        self._piece = piece
        self._decode = _Utf8Decoder("replace").decode
        self._strip = strip_leading_space

    def feed(self, token_id: int) -> str:
        """Return the text that became certain with this token; often one word, sometimes ""."""
        text = self._decode(self._piece(token_id))
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        """Return what was held back: U+FFFD for a character that never became whole."""
        text = self._decode(b"", True)
        return self._stripped(text) if self._strip and text else text

    def _stripped(self, text: str) -> str:
        self._strip = False
        return text.removeprefix(" ")


class StopMatcher:
    """Passes text through up to the first stop string to complete, and hides partial matches.

    Of several stops that complete at one character the one that began first wins. `include` keeps
    the stop string in the text.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show and the stop string that completed, if one did.

        After a stop has completed, the matcher is done: text behind it is dropped.
        """
        if not self._stops or not text:
            return text, None
        pending = self._held + text
        first = self._first_completed(pending)
        if first is not None:
            begin, stop = first
            self._held = ""
            return pending[: begin + len(stop)] if self._include else pending[:begin], stop
        keep = self._num_held(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """Return the text held for a stop string that did not complete."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, pending: str) -> tuple[int, str] | None:
        """Return (begin, stop) of the earliest end, and of the earliest begin among those."""
        found = [(pending.find(stop), stop) for stop in self._stops]
        ends = [(begin + len(stop), begin, stop) for begin, stop in found if begin >= 0]
        if not ends:
            return None
        _, begin, stop = min(ends)
        return begin, stop

    def _num_held(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        for length in range(min(self._longest - 1, len(pending)), 0, -1):
            end = pending[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
