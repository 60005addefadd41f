"""Server-sent events, read from packets that may end anywhere."""

from __future__ import annotations

from typing import NamedTuple

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # a stream may begin with one
_LINE_BYTES = 64  # that a line takes beside its text


class Event(NamedTuple):
    """`is_error`: its name says so (`event: error`), whatever its data look like."""

    data: bytes
    is_error: bool = False


class EventReader:
    """Turns the bytes of an event stream into its events.

    Lines end in LF, CRLF or CR and are cut before decoding, so that U+2028 inside a text is text.
    Comments and fields other than `data` and `event` are passed over, but for `error: {…}`, which
    llama.cpp sends in place of an event: its text is the data of an error.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_error = False
        self._num_data_bytes = 0
        self._is_at_start = True

    @property
    def num_held(self) -> int:
        """Bytes of the event that is not complete yet."""
        return len(self._rest) + self._num_data_bytes

    def feed(self, packet: bytes) -> list[Event]:
        """Return the events that `packet` completes."""
        text = self._rest + packet if self._rest else packet
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # the LF may come with the next packet
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        events: list[Event] = []
        for line in lines:
            self._take(line, events)
        return events

    def finish(self) -> list[Event]:
        """Return what the stream's end leaves: an event whose blank line never came."""
        events: list[Event] = []
        self._take(self._rest.removesuffix(b"\r"), events)
        self._rest = b""
        self._take(b"", events)
        return events

    def _take(self, line: bytes, events: list[Event]) -> None:
        if self._is_at_start:
            line, self._is_at_start = line.removeprefix(_BYTE_ORDER_MARK), False
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._add(value)
        elif name == b"event":
            self._is_error = value == b"error"
        elif name == b"error":
            self._is_error = True
            self._add(value)
        elif not line:
            self._end(events)

    def _add(self, data: bytes) -> None:
        self._data.append(data)
        self._num_data_bytes += len(data) + _LINE_BYTES

    def _end(self, events: list[Event]) -> None:
        """Take note of an event's end. An error needs no data to be one."""
        if self._data or self._is_error:
            events.append(Event(b"\n".join(self._data), self._is_error))
        self._data.clear()
        self._num_data_bytes = 0
        self._is_error = False
