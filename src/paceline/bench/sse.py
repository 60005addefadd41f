"""Server-sent events, read from packets that may end anywhere."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # a stream may begin with one
_LINE_BYTES = 64  # that a line takes beside its text


class EventReader:
    """Turns the bytes of an event stream into the payloads of its events.

    Lines end in LF, CRLF or CR and are cut before decoding, so that U+2028 inside a text is text.
    Comments and fields other than `data` are passed over, but for `error: {…}`, which llama.cpp
    sends in place of an event: it becomes the payload {"error": {…}}.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_at_start = True

    @property
    def num_held(self) -> int:
        """Bytes of the event that is not complete yet."""
        return len(self._rest) + self._num_data_bytes

    def feed(self, packet: bytes) -> list[bytes]:
        """Return the payloads of the events that `packet` completes."""
        text = self._rest + packet if self._rest else packet
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # the LF may come with the next packet
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._rest = rest + held
        payloads: list[bytes] = []
        for line in lines:
            self._take(line, payloads)
        return payloads

    def finish(self) -> list[bytes]:
        """Return what the stream's end leaves: an event whose blank line never came."""
        payloads: list[bytes] = []
        self._take(self._rest.removesuffix(b"\r"), payloads)
        self._rest = b""
        self._take(b"", payloads)
        return payloads

    def _take(self, line: bytes, payloads: list[bytes]) -> None:
        if self._is_at_start:
            line, self._is_at_start = line.removeprefix(_BYTE_ORDER_MARK), False
        if line.startswith(b"data:"):
            self._add(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"error:"):
            self._add(b'{"error":' + line[6:] + b"}")
        elif not line and self._data:
            payloads.append(b"\n".join(self._data))
            self._data.clear()
            self._num_data_bytes = 0

    def _add(self, data: bytes) -> None:
        self._data.append(data)
        self._num_data_bytes += len(data) + _LINE_BYTES
