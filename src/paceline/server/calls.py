"""Call: the wall time of one HTTP call, from the first byte read to the last byte written."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal

from msgspec import Struct, field

from paceline.measure.ledger import (
    NUM_PARTS,
    RESIDUAL,
    UNBOOKED,
    Ledger,
    Part,
    parts_ms,
    top_blame,
)
from paceline.types import Delta, FinishReason, SamplingParams, Timings, Usage

Outcome = Literal["ok", "refused", "aborted", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "refused", "aborted", "failed")

_ENDPOINTS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
MAX_CALLS = 512  # finished calls that are remembered
MAX_CHOICES = 4096  # choices of all of them together
_MAX_NAME = 200  # characters of a model's name that is asked for
_MAX_BLAMED = 8  # requests that a report blames by name


class Ended(Struct, frozen=True):
    """How one choice ended. `received_ns` is when the event loop learnt of it.

    One that still runs has no finish reason, and ends whenever somebody looks.
    """

    finish_reason: FinishReason | None
    usage: Usage
    timings: Timings
    ledger: Ledger | None
    received_ns: int

    @property
    def end_ns(self) -> int:
        return self.received_ns if self.ledger is None else self.ledger.end_ns


class Call(Struct, eq=False, kw_only=True):
    """What a call spent its time on. `lap` books the front end's time, `ended` brings the engine's.

    Where several choices run, the call follows the one that ends last: the others cost it nothing.
    Written by one thread at a time.
    """

    path: str
    begin_ns: int
    on_close: Callable[[Call], None]
    began_at: float = field(default_factory=time.time)  # Unix seconds, for logs
    id: str = ""  # of the answer
    request_id: str = ""  # X-Request-Id
    model: str = ""  # in whose books it stands; of a call that names none, the server's first
    asked_model: str = ""  # as the client wrote it; "": not known
    traceparent: str = ""
    client: str = ""
    is_stream: bool = False
    num_choices: int = 0
    n: int = 1
    num_embedded: int = 0  # tokens of the texts of a call that embeds; it has no choices
    max_tokens: int | None = None
    temperature: float = 0.0
    status: int = 0  # 0: the client left before there was one
    is_gone: bool = False  # the client hung up
    error: str | None = None
    mark_ns: int = 0
    end_ns: int = 0
    first_content_ns: int = 0  # the first content was written to a stream
    _ns: list[int] = field(default_factory=lambda: [0] * NUM_PARTS)
    choices: dict[int, Ended] = field(default_factory=dict)
    _responded_ns: int = 0

    def __post_init__(self) -> None:
        self.mark_ns = self.begin_ns

    # ---- booking ----

    def lap(self, part: Part) -> int:
        """Book the time since the last lap as `part`; return the time."""
        now_ns = time.monotonic_ns()
        self._ns[part] += now_ns - self.mark_ns
        self.mark_ns = now_ns
        return now_ns

    def asked_for(self, model: object) -> None:
        """The body has this in its field `model`; of a long name the beginning is kept."""
        if isinstance(model, str):
            self.asked_model = model[:_MAX_NAME]

    def accepted(self, params: SamplingParams, *, num_prompts: int, is_stream: bool) -> None:
        """The engine has taken the call's requests."""
        self.n = params.n
        self.num_choices = params.n * num_prompts
        self.max_tokens, self.temperature = params.max_tokens, params.temperature
        self.is_stream = is_stream

    def ended(self, choice_idx: int, delta: Delta) -> None:
        """A choice has come to its end. Precondition: `delta` is its last.

        A call that was not accepted, because one of its prompts was refused, has no choices: what
        the others had begun does not count.
        """
        if not self.num_choices:
            return
        assert delta.finish_reason is not None
        assert delta.usage is not None
        assert delta.timings is not None
        self.choices[choice_idx] = Ended(
            delta.finish_reason, delta.usage, delta.timings, delta.ledger, time.monotonic_ns()
        )
        if delta.error is not None:
            self.error = delta.error
        self._close_if_over()

    def wrote_content(self) -> None:
        if not self.first_content_ns:
            self.first_content_ns = time.monotonic_ns()

    def started(self, status: int) -> None:
        """The response's head is on its way."""
        self.status = status
        if not self.num_choices:  # refused: all until now went into finding out why
            self.lap(Part.PARSE)

    def responded(self) -> None:
        """The last byte is written, or there is nobody left to write to."""
        self._responded_ns = time.monotonic_ns()
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._responded_ns and not self.end_ns and len(self.choices) == self.num_choices:
            last_ns = max((ended.received_ns for ended in self.choices.values()), default=0)
            self.end_ns = max(self._responded_ns, last_ns)
            self.on_close(self)

    # ---- reading ----

    @property
    def endpoint(self) -> str:
        return _ENDPOINTS.get(self.path, "chat")

    @property
    def outcome(self) -> Outcome:
        reasons = {ended.finish_reason for ended in self.choices.values()}
        if "error" in reasons or self.status >= 500:
            return "failed"
        if self.is_gone or self.status in (0, 499):
            return "aborted"
        if "abort" in reasons:  # nobody asked for it: the server stopped
            return "failed"
        return "refused" if self.status >= 400 else "ok"

    @property
    def answering_model(self) -> str:
        """The model that began to answer; "" where none did."""
        return self.model if self.num_choices or self.num_embedded else ""

    @property
    def is_computed(self) -> bool:
        """Every choice has ended; the reply may still be on its way."""
        has_all = 0 < self.num_choices == len(self.choices)
        return has_all and all(ended.finish_reason for ended in self.choices.values())

    @property
    def last(self) -> Ended | None:
        """The choice that ended last, which the call's time follows."""
        return max(self.choices.values(), key=lambda ended: ended.end_ns, default=None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever n is, or of all texts embedded."""
        prompts = (e.usage.prompt_tokens for i, e in self.choices.items() if i % self.n == 0)
        return sum(prompts) + self.num_embedded

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were found in the prefix cache."""
        return sum(e.usage.cached_tokens for i, e in self.choices.items() if i % self.n == 0)

    @property
    def completion_tokens(self) -> int:
        return sum(ended.usage.completion_tokens for ended in self.choices.values())

    def wall_ns(self, now_ns: int = 0) -> int:
        return (self.end_ns or now_ns) - self.begin_ns

    def parts(self, now_ns: int = 0) -> list[int]:
        """Return ns by Part, up to the call's end or, while it is open, to `now_ns`."""
        ns = list(self._ns)
        end_ns = self.end_ns or now_ns
        last = self.last
        if last is None:
            if not self.num_choices and (self.end_ns or self.status):
                ns[Part.SEND] += max(end_ns - self.mark_ns, 0)
            return ns
        if last.ledger is not None:
            for part, spent in enumerate(last.ledger.ns):
                ns[part] += spent
            ns[Part.HANDOFF] += last.received_ns - last.ledger.end_ns
        if last.finish_reason is not None:
            ns[Part.SEND] += end_ns - last.received_ns
        return ns

    @property
    def _first(self) -> Ledger | None:
        """The ledger of the choice whose text came first."""
        ledgers = (ended.ledger for ended in self.choices.values() if ended.ledger is not None)
        spoken = [ledger for ledger in ledgers if ledger.first_text is not None]
        return min(spoken, key=lambda ledger: ledger.first_text_ns, default=None)

    @property
    def ttft_ns(self) -> int | None:
        """To the first content byte written; of a whole answer, to its first text made."""
        first = self._first
        if self.is_stream:
            return self.first_content_ns - self.begin_ns if self.first_content_ns else None
        return None if first is None else first.first_text_ns - self.begin_ns

    def ttft_parts(self) -> list[int] | None:
        """Return ns by Part of the time to the first content; what follows its making is SEND."""
        first, ttft_ns = self._first, self.ttft_ns
        if first is None or first.first_text is None or ttft_ns is None:
            return None
        ns = [a + b for a, b in zip(self._ns, first.first_text, strict=True)]
        ns[Part.SEND] += self.begin_ns + ttft_ns - first.first_text_ns
        return ns

    def phases(self) -> list[tuple[str, int, int]]:
        """Return (phase, begin, end) of a finished call, in order and without gaps."""
        last = self.last
        if last is None or last.ledger is None:
            return [("http", self.begin_ns, self.end_ns)]
        arrival_ns, end_ns = last.ledger.begin_ns, last.ledger.end_ns
        scheduled_ns = min(arrival_ns + round(last.timings.queue_s * 1e9), end_ns)
        first_ns = min(arrival_ns + round(last.timings.ttft_s * 1e9), end_ns)
        stamps = (
            ("http", arrival_ns), ("queue", scheduled_ns), ("prefill", first_ns),
            ("decode", end_ns), ("send", self.end_ns),
        )  # fmt: skip
        begins = (self.begin_ns, *(stamp for _, stamp in stamps))
        return [
            (name, begin, end)
            for begin, (name, end) in zip(begins, stamps, strict=False)
            if end > begin
        ]

    def figures(self, now_ns: int = 0) -> dict[str, Any]:
        """Return what `usage.paceline`, the timeline and the access log say about the time."""
        wall_ns = self.wall_ns(now_ns)
        ttft_ns, ttft_parts, last = self.ttft_ns, self.ttft_parts(), self.last
        rest = RESIDUAL if self.end_ns or self.is_computed else UNBOOKED
        figures: dict[str, Any] = {
            "wall_ms": wall_ns / 1e6,
            "ttft_ms": None if ttft_ns is None else ttft_ns / 1e6,
            "tpot_ms": _tpot_ms(last),
            "parts_ms": parts_ms(self.parts(now_ns), wall_ns, rest),
            "ttft_parts_ms": (
                None if ttft_parts is None or ttft_ns is None else parts_ms(ttft_parts, ttft_ns)
            ),
        }
        if last is not None and last.ledger is not None:
            figures["blame"] = blame_report(last.ledger)
            figures["repeated_tokens"] = last.ledger.num_repeated
        timings = [ended.timings for ended in self.choices.values()]
        if num_drafted := sum(t.num_drafted for t in timings):
            figures["drafted_tokens"] = num_drafted
            figures["accepted_tokens"] = sum(t.num_accepted for t in timings)
        if num_forced := sum(t.num_forced for t in timings):
            figures["forced_tokens"] = num_forced
        return figures


def _tpot_ms(ended: Ended | None) -> float | None:
    if ended is None or ended.timings.tpot_s is None:
        return None
    return ended.timings.tpot_s * 1e3


def blame_report(ledger: Ledger) -> dict[str, Any]:
    """Return what others, and the lack of memory, cost a sequence; all of it is in its parts."""
    others = ledger.ns[Part.PREFILL_OTHERS] + ledger.ns[Part.DECODE_OTHERS]
    prefill = sum(ledger.blame.values())
    return {
        "prefill_of": [
            {"request": request_id or None, "ms": ns / 1e6}
            for request_id, ns in top_blame(ledger.blame, _MAX_BLAMED)
        ],
        "prefill_ms": prefill / 1e6,
        "decode_ms": (others - prefill) / 1e6,
        "preemption_ms": ledger.preempted_ns / 1e6,
        "num_preemptions": ledger.num_preemptions,
        **({"rejected_drafts_ms": ledger.rejected_ns / 1e6} if ledger.ns[Part.VERIFY] else {}),
    }


class CallLog:
    """The latest finished calls, found by the answer's id or the caller's X-Request-Id."""

    def __init__(self, max_calls: int = MAX_CALLS, max_choices: int = MAX_CHOICES) -> None:
        self._calls: OrderedDict[int, Call] = OrderedDict()
        self._keys: dict[str, int] = {}
        self._max_calls = max_calls
        self._max_choices = max_choices
        self._num_choices = 0
        self._num_added = 0

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        self._num_added += 1
        self._calls[self._num_added] = call
        self._num_choices += call.num_choices
        for key in _keys(call):
            self._keys[key] = self._num_added
        while len(self._calls) > self._max_calls or self._num_choices > self._max_choices:
            number, old = self._calls.popitem(last=False)
            self._num_choices -= old.num_choices
            for key in _keys(old):
                if self._keys.get(key) == number:  # a later call may have the same X-Request-Id
                    del self._keys[key]

    def find(self, key: str) -> Call | None:
        number = self._keys.get(key)
        return None if number is None else self._calls[number]


def _keys(call: Call) -> list[str]:
    return [key for key in (call.id, call.request_id) if key]
