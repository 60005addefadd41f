"""Answer: what one response turned out to be, and when each part of it arrived."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from paceline.bench.sse import Event, EventReader

_decode = msgspec.json.decode
_FIRST_BYTE = re.compile(rb"\s{0,4096}+(\S)")
_PHASE = re.compile(r"[\w.-]{1,60}")
_UNITS = {"s": 1.0, "ms": 1e-3}
_MAX_ERROR_CHARS = 300
_MAX_SHOWN_CHARS = 60
_MAX_PHASES = 100
_MAX_TOKENS = 10**9  # of one answer; what is above is no count
_MAX_SECONDS = 1e9
# What is kept of a response is bounded, whatever a server sends.
_MAX_STREAM_BYTES = 256 << 20
_MAX_EVENT_BYTES = 4 << 20
_MAX_WHOLE_BYTES = 16 << 20
_MAX_ERROR_BYTES = 1 << 20  # an error beyond is read up to here


class _ShapeError(Exception):
    """A field is not what the API says it is."""


class Answer:
    """Takes a response (it is an http.Sink) of any OpenAI dialect that we have met.

    Text is the content, the reasoning or the arguments of a tool call, of any choice. An
    *arrival* is a moment at which text came, whatever number of events one packet brought: it is
    what a reader sees. Role-only and empty chunks are none.
    """

    __slots__ = (
        "_body", "_num_bytes", "_reader", "arrivals", "cached_tokens", "calls", "connected_at",
        "content_at", "contents", "error", "finish_reason", "first_byte_at", "headers",
        "input_tokens", "is_done", "keeps_text", "num_choices", "num_text_events", "num_unread",
        "output_tokens", "phases", "status", "texts",
    )  # fmt: skip

    def __init__(self, *, keeps_text: bool) -> None:
        self.keeps_text = keeps_text
        self.connected_at: float | None = None
        self.first_byte_at: float | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.arrivals = array("d")
        self.content_at: float | None = None  # the first text that is no reasoning
        self.num_choices = 0
        self.num_text_events = 0
        self.num_unread = 0
        self.texts: list[str] = []
        self.contents: list[str] = []  # of the texts, what is neither reasoning nor a call
        self.calls: dict[int, list[str]] = {}  # by index: the name and the arguments
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False
        self.phases: dict[str, float] = {}
        self._reader: EventReader | None = None
        self._body = bytearray()
        self._num_bytes = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_complete(self) -> bool:
        """True where the server said that it was the end."""
        return self.is_done or self.finish_reason is not None

    def on_connected(self, now: float) -> None:
        self.connected_at = now

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status
        self.headers = headers
        self.first_byte_at = now
        for metric in headers.get("server-timing", "").split(","):
            name, *parameters = (part.strip() for part in metric.split(";"))
            for parameter in parameters:
                if parameter.startswith("dur="):
                    with suppress(ValueError):  # it is no number: nothing is known of that phase
                        self._add_phase(name, float(parameter[4:]) / 1e3)
        coding = headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            what = printable(coding[:_MAX_SHOWN_CHARS])
            self.error = f"no answer: its body is {what}, and the request takes identity alone"
        elif status == 200 and "text/event-stream" in headers.get("content-type", "").lower():
            self._reader = EventReader()

    def on_body(self, data: bytes, now: float) -> bool:
        self._num_bytes += len(data)
        if self._reader is None and self.error is not None:  # the head said so
            return False
        if self._reader is None:
            self._body += data
            if not self._is_untyped_stream():
                return self._has_room()
            self._reader, data = EventReader(), bytes(self._body)
            self._body.clear()
        for event in self._reader.feed(data):
            self._on_event(event, now)
        return self._has_room()

    def _has_room(self) -> bool:
        """True while the response is no longer than any answer; else it is an error."""
        if self._reader is None and self.status != 200:
            return self._num_bytes <= _MAX_ERROR_BYTES
        if self._reader is None:
            what, size, limit = "body", self._num_bytes, _MAX_WHOLE_BYTES
        elif self._reader.num_held > _MAX_EVENT_BYTES:
            what, size, limit = "event", self._reader.num_held, _MAX_EVENT_BYTES
        else:
            what, size, limit = "stream", self._num_bytes, _MAX_STREAM_BYTES
        if size <= limit:
            return True
        self.error = self.error or f"no answer: its {what} is longer than {limit >> 20} MiB"
        self._reader = None
        self._body.clear()
        return False

    def _is_untyped_stream(self) -> bool:
        """True where a 200 has no Content-Type and does not begin as a JSON object does."""
        if self.status != 200 or self.headers.get("content-type"):
            return False
        begin = _FIRST_BYTE.match(self._body)
        return begin is not None and begin[1] != b"{"

    def finish(self, now: float) -> None:
        """Read what is left once the response is complete."""
        if self._reader is not None:
            for event in self._reader.finish():
                self._on_event(event, now)
        elif self._body or (self.status == 200 and self.error is None):
            body = bytes(self._body)
            self._body.clear()
            self._on_whole(body, now)

    def _on_whole(self, body: bytes, now: float) -> None:
        """A response that is no stream: an error, or a server that ignores `stream`."""
        content = read_json(body)
        if self.status != 200 or not isinstance(content, dict) or _is_error(content):
            self.error = error_text(content) or _cut(body) or "no answer: no body"
            return
        self._on_object(content, now)
        self.is_done = True

    def _on_event(self, event: Event, now: float) -> None:
        if not event.is_error and event.data.strip() == b"[DONE]":
            self.is_done = True
            return
        content = read_json(event.data)
        if event.is_error:
            self.error = error_text(content) or _cut(event.data) or "error"
        elif not isinstance(content, dict):
            self.num_unread += 1
        elif _is_error(content):
            self.error = error_text(content) or "error"
        else:
            self._on_object(content, now)

    def _on_object(self, event: dict[str, Any], now: float) -> None:
        """Take what an object holds. One that breaks the API's form makes the answer an error."""
        try:
            for choice in _items(event, "choices"):
                self.num_choices += 1
                self._on_choice(choice, now)
            self._on_usage(_fields(event, "usage"))
            self._take_phases(_fields(event, "timings"))  # llama.cpp
        except _ShapeError as error:
            self.error = self.error or f"no answer: {error}"

    def _on_choice(self, choice: dict[str, Any], now: float) -> None:
        name = "delta" if choice.get("delta") else "message"
        delta = _fields(choice, name)
        thoughts, rest = self._delta_texts(delta) if delta else ("", _string(choice, "text"))
        if rest and self.content_at is None:
            self.content_at = now
        if text := thoughts + rest:
            self.num_text_events += 1
            if not self.arrivals or self.arrivals[-1] != now:
                self.arrivals.append(now)
            if self.keeps_text:
                self.texts.append(text)
        if reason := choice.get("finish_reason"):
            self.finish_reason = printable(str(reason)[:_MAX_ERROR_CHARS])

    def _delta_texts(self, delta: dict[str, Any]) -> tuple[str, str]:
        """Return the reasoning in a delta, and its content and calls."""
        text = as_text(delta.get("content"))
        if self.keeps_text and text:
            self.contents.append(text)
        for number, call in enumerate(_items(delta, "tool_calls")):
            function = _fields(call, "function")
            parts = _string(function, "name"), _string(function, "arguments")
            text += "".join(parts)
            if self.keeps_text:
                index = call.get("index")
                kept = self.calls.setdefault(index if type(index) is int else number, ["", ""])
                kept[:] = [before + part for before, part in zip(kept, parts, strict=True)]
        return as_text(delta.get("reasoning_content") or delta.get("reasoning")), text

    def _on_usage(self, usage: dict[str, Any]) -> None:
        self.input_tokens = _count(usage, "prompt_tokens", self.input_tokens)
        self.output_tokens = _count(usage, "completion_tokens", self.output_tokens)
        details = _fields(usage, "prompt_tokens_details")
        self.cached_tokens = _count(details, "cached_tokens", self.cached_tokens)
        if isinstance(ledger := usage.get("paceline"), dict):
            self.phases.clear()  # it has all that the header could know by then
            self._take_phases(ledger)

    def _take_phases(self, timings: dict[str, Any], prefix: str = "", unit: str = "") -> None:
        """Keep the durations among `timings`, by name without the unit, in seconds.

        The name tells the unit, its own or that of the object that it stands in.
        """
        for name, value in timings.items():
            stem, _, ending = name.rpartition("_")
            own = ending if ending in _UNITS and stem else unit
            label = stem if ending in _UNITS and stem else name
            if isinstance(value, dict):
                self._take_phases(value, "" if label == "parts" else f"{prefix}{label}.", own)
            elif own and isinstance(value, int | float) and not isinstance(value, bool):
                self._add_phase(prefix + label, value * _UNITS[own])

    def _add_phase(self, name: str, seconds: float) -> None:
        """Keep a phase whose name and duration can be shown, the first hundred."""
        is_room = name in self.phases or len(self.phases) < _MAX_PHASES
        if is_room and 0 <= seconds <= _MAX_SECONDS and _PHASE.fullmatch(name):
            self.phases[name] = seconds


def _is_error(event: dict[str, Any]) -> bool:
    """True for {"error": …}, and for the flat object that older vLLMs send within a stream."""
    return bool(event.get("error")) or event.get("object") == "error"


def read_json(data: bytes) -> Any:
    """Return the JSON in `data`, None where there is none that can be read."""
    try:
        return _decode(data)
    except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
        return None


def _fields(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    if value is not None and not isinstance(value, dict):
        raise _ShapeError(f"{name} is {_shown(value)}, not an object")
    return value or {}


def _items(parent: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = parent.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _ShapeError(f"{name} is {_shown(value)}, not a list of objects")
    return value


def _string(parent: dict[str, Any], name: str) -> str:
    value = parent.get(name)
    if value is not None and not isinstance(value, str):
        raise _ShapeError(f"{name} is {_shown(value)}, not a string")
    return value or ""


def _count(parent: dict[str, Any], name: str, before: int | None) -> int | None:
    """Return the count of that name, or `before` where there is none."""
    value = parent.get(name)
    if value is None:
        return before
    if type(value) is not int or not 0 <= value <= _MAX_TOKENS:
        raise _ShapeError(f"{name} is {_shown(value)}, not a number of tokens")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def as_text(content: Any) -> str:
    """Return content as text: a string, or a list of parts with a `text` each."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def error_text(body: Any) -> str | None:
    """Return the message of an error object, cut to a line's length."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or str(error)
    return None if error is None else printable(str(error)[:_MAX_ERROR_CHARS])


def redirection(status: int, headers: Mapping[str, str]) -> str | None:
    """Return where a response sends its reader, in words. The bench does not follow."""
    location = headers.get("location")
    if location is None or not 300 <= status < 400:
        return None
    return f"it redirects to {printable(location[:_MAX_ERROR_CHARS])}: name that address"


def _cut(body: bytes) -> str:
    """Return the beginning of what is no error object, for a line."""
    return printable(body[:_MAX_ERROR_CHARS].decode("utf-8", "replace"))


def printable(text: str) -> str:
    """Return text with its control characters escaped: a server shall not steer our terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
