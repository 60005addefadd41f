"""ToolReader: tells the calls in a model's answer from its words, while it is being written."""

from __future__ import annotations

import json
from collections.abc import Collection

from msgspec import Struct

from paceline.text.reasoning import Thought
from paceline.text.tools import CALL_BEGIN, CALL_END, ToolStyle

_ARGUMENTS = ("arguments", "parameters")
_BETWEEN = " \t\r\n;,[]"  # what may stand around calls that no marker tells apart


class Content(Struct, frozen=True):
    """Words of the answer."""

    text: str


class CallBegun(Struct, frozen=True):
    """The call number `index` of the answer has a name."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """More of a call's arguments; all of them joined are JSON text."""

    index: int
    text: str


Piece = Thought | Content | CallBegun | CallArguments


class ToolReader:
    """Takes an answer's text bit by bit and returns pieces as soon as they are certain.

    However the text is cut, the joined pieces are the same. What looks like a call but is none (no
    JSON, no tool's name) is content. Blanks around calls are dropped; an answer without calls is
    given back as it is.
    """

    def __init__(
        self,
        style: ToolStyle,
        names: Collection[str],
        *,
        max_calls: int,
        is_bound: bool = False,  # the answer is calls and nothing else
    ) -> None:
        self._is_bound = is_bound
        self._is_tagged = style is not ToolStyle.BARE
        self._names = names
        self._max_calls = max_calls
        self._pending = ""  # not yet known to be content or call
        self._blanks = ""  # content that is dropped where a call follows
        self._call: _CallScanner | None = None
        self._is_after_call = False
        self._is_plain = False  # bare calls can begin an answer, not stand in the middle of it
        self._num_begun = 0
        self.num_complete = 0

    @property
    def has_only_whole_calls(self) -> bool:
        return 0 < self._num_begun == self.num_complete

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._pending += text
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back. A call that was cut keeps the arguments it has.

        `is_cut` says that the answer was to go on: what would have become a call is no content.
        """
        pieces: list[Piece] = []
        if is_cut and self._is_in_head:
            self._call, self._pending = None, ""
        elif self._call is not None and not self._call.is_begun:
            self._content(self._call.taken, pieces)
        elif self._call is None and not self._is_after_call:
            self._content(self._pending, pieces)
        if self._blanks and not self._num_begun:
            pieces.append(Content(self._blanks))
        self._pending = self._blanks = ""
        return pieces

    @property
    def _is_in_head(self) -> bool:
        """Whether the text ends before the name of what must be a call, or has its marker.

        A lone "<", or an object without markers, may be meant as words.
        """
        if self._call is not None:
            return not self._call.is_begun and (self._is_bound or self._is_tagged)
        return self._is_bound or (self._is_tagged and len(self._pending) > 1)

    def _step(self, pieces: list[Piece]) -> bool:
        """Move on as far as the pending text allows; return True if there may be more to do."""
        if self._call is not None:
            return self._read_call(self._call, pieces)
        if self._is_after_call and self._is_tagged:
            return self._read_end()
        if self._num_begun >= self._max_calls:
            self._pending = ""
            return False
        return self._find_tagged(pieces) if self._is_tagged else self._find_bare(pieces)

    def _find_tagged(self, pieces: list[Piece]) -> bool:
        begin = self._pending.find(CALL_BEGIN)
        if begin >= 0:
            self._content(self._pending[:begin], pieces)
            self._begin(CALL_BEGIN, self._pending[begin + len(CALL_BEGIN) :])
            return True
        keep = _overlap(self._pending, CALL_BEGIN)
        self._content(self._pending[: len(self._pending) - keep], pieces)
        self._pending = self._pending[len(self._pending) - keep :]
        return False

    def _find_bare(self, pieces: list[Piece]) -> bool:
        rest = self._pending.lstrip(_BETWEEN)
        if not self._is_plain and rest.startswith("{"):
            self._begin(self._pending[: len(self._pending) - len(rest)], rest)
            return True
        if rest or self._is_plain:
            self._is_plain = True
            self._content(self._pending, pieces)
            self._pending = ""
        return False

    def _begin(self, before: str, rest: str) -> None:
        self._call = _CallScanner(self._names, before)
        self._pending = rest
        self._is_after_call = False

    def _read_call(self, call: _CallScanner, pieces: list[Piece]) -> bool:
        was_begun = call.is_begun
        arguments, self._pending = call.feed(self._pending)
        if call.is_begun and not was_begun:
            self._blanks = ""
            self._num_begun += 1
            pieces.append(CallBegun(self._num_begun - 1, call.name))
        if arguments:
            pieces.append(CallArguments(self._num_begun - 1, arguments))
        if not call.is_over:
            return False
        self._call = None
        self.num_complete += call.is_complete
        self._is_after_call = call.is_begun
        if not call.is_begun:
            self._is_plain = True
            self._content(call.taken, pieces)
        return True

    def _read_end(self) -> bool:
        """Drop the marker that closes a call, if it is there."""
        rest = self._pending.lstrip()
        if not rest or (CALL_END.startswith(rest) and rest != CALL_END):
            return False
        self._pending = rest.removeprefix(CALL_END)
        self._is_after_call = False
        return True

    def _content(self, text: str, pieces: list[Piece]) -> None:
        text = self._blanks + text
        words = text.rstrip()
        self._blanks = text[len(words) :]
        if words:
            pieces.append(Content(words))


class _CallScanner:
    """Reads one object with a name and arguments, in either order, character by character."""

    def __init__(self, names: Collection[str], before: str) -> None:
        self.taken = before  # all text so far, for what turns out to be no call
        self.name = ""
        self.is_begun = False  # the name is known, and it is a tool's
        self.is_over = False
        self.is_complete = False
        self._names = names
        self._wants = "{"  # the structural character that comes next, "" inside a value
        self._key = ""
        self._value = ""
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self._arguments: str | None = None  # those that are whole
        self._news = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Return the arguments that became certain, and the text behind the call's end."""
        self._news = ""
        for i, char in enumerate(text):
            self.taken += char
            if self._wants:
                self._read_structure(char)
            else:
                self._read_value(char)
            if self.is_over:
                return self._news, text[i + 1 :]
        return self._news, ""

    def _read_structure(self, char: str) -> None:
        if char in " \t\r\n":
            return
        wants = self._wants
        if wants == "{" and char == "{":
            self._wants = "key"
        elif wants == "key" and char == '"':
            self._key, self._value, self._wants = "", "", ""
            self._read_value(char)
        elif wants == ":" and char == ":":
            self._wants = "value"
        elif wants == "value":
            self._value, self._wants = "", ""
            self._read_value(char)
        elif wants == "," and char == ",":
            self._wants = "key"
        elif char == "}" and wants in (",", "key"):
            self._end()
        else:
            self.is_over = True

    def _read_value(self, char: str) -> None:
        is_scalar = bool(self._value) and self._value[0] not in '"{['
        if is_scalar and char in ",} \t\r\n":
            self._take_value()
            if not self.is_over:
                self._read_structure(char)
            return
        self._value += char
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._is_in_string = False
        elif char == '"':
            self._is_in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._key in _ARGUMENTS and self.is_begun and self._value[0] == "{":
            self._news += char
        if not self._is_in_string and self._depth == 0 and self._value[0] in '"{[':
            self._take_value()

    def _take_value(self) -> None:
        """A key or its value is whole."""
        value, key = self._value, self._key
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        if not key:
            self._key, self._wants = str(parsed or value), ":"
            return
        self._wants, self._key = ",", ""
        if key == "name":
            self._take_name(parsed)
        elif key in _ARGUMENTS:
            # Some models write the arguments as a string that holds JSON.
            text = parsed if isinstance(parsed, str) else value
            if not text.startswith("{"):
                self.is_over = True
            elif not self.is_begun or not value.startswith("{"):
                self._arguments = text
                self._news += text if self.is_begun else ""
            else:
                self._arguments = text

    def _take_name(self, name: object) -> None:
        if isinstance(name, str) and name in self._names and not self.is_begun:
            self.name, self.is_begun = name, True
            self._news += self._arguments or ""
        else:
            self.is_over = True

    def _end(self) -> None:
        self.is_over = True
        self.is_complete = self.is_begun
        if self.is_begun and self._arguments is None:
            self._news += "{}"


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
