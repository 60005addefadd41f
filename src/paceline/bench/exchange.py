"""Exchange: one request that was sent, its times and how it ended."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import numpy as np

from paceline.bench.answer import Answer, redirection
from paceline.bench.conversation import Turn
from paceline.bench.prose import TokenCounter
from paceline.bench.validity import are_valid_calls, is_valid_json

Outcome = Literal["ok", "refused", "error", "broken", "timeout", "cut"]
OUTCOMES: dict[Outcome, str] = {
    "ok": "complete answers",
    "refused": "429 or 503: come back later",
    "error": "other error answers, and errors within a stream",
    "broken": "connections that failed or ended early",
    "timeout": "longer than the client waits",
    "cut": "still open at the end of the run",
}
_REFUSALS = (429, 503)
_FAILED_REASONS = ("abort", "error")  # of vLLM and SGLang, where the engine gave an answer up


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Times are of the monotonic clock, in seconds. `scheduled_at` is when the request was due:
    latency counts from it, so that a client or a queue that lags cannot hide the wait."""

    idx: int
    kind: str
    turn_idx: int
    turn: Turn
    answer: Answer
    scheduled_at: float
    is_warmup: bool = False
    num_bytes: int = 1  # of the request
    prompt_text: str | None = None  # kept where a tokenizer counts it
    sent_at: float = math.nan
    ended_at: float = math.nan
    outcome: Outcome = "cut"
    error: str | None = None

    def close(self, now: float, outcome: Outcome | None = None, error: str | None = None) -> None:
        """Note the end; without an `outcome` the answer itself says how it went."""
        self.answer.finish(now)
        self.ended_at = now
        if outcome is None:
            outcome, error = self._judge()
        self.outcome, self.error = outcome, error

    def _judge(self) -> tuple[Outcome, str | None]:
        answer = self.answer
        if answer.status in _REFUSALS:
            return "refused", answer.error or f"HTTP {answer.status}"
        if answer.status != 200:
            what = redirection(answer.status, answer.headers) or answer.error or "no message"
            return "error", f"HTTP {answer.status}: {what}"
        if answer.error is not None:
            return "error", answer.error
        if answer.finish_reason in _FAILED_REASONS:
            return "error", f"the server ended it with finish reason {answer.finish_reason!r}"
        if not answer.is_complete:
            return "broken", "the stream ended without a finish reason or [DONE]"
        if not answer.num_choices:
            unread = f", {answer.num_unread} events are no JSON object" if answer.num_unread else ""
            return "error", f"no answer: no choice came{unread}"
        return "ok", None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds that a refusal asks us to wait: it says a number, or until when."""
        value = self.answer.headers.get("retry-after", "")
        try:
            seconds = float(value)
        except ValueError:
            with contextlib.suppress(ValueError, OverflowError):  # it is no date either
                until = parsedate_to_datetime(value)
                return max(0.0, until.timestamp() - time.time())
            return None
        return seconds if 0 <= seconds < math.inf else None

    @property
    def lag_s(self) -> float:
        return self.sent_at - self.scheduled_at

    @property
    def connect_s(self) -> float:
        connected = self.answer.connected_at
        return math.nan if connected is None else connected - self.sent_at

    @property
    def ttft_s(self) -> float:
        arrivals = self.answer.arrivals
        return arrivals[0] - self.scheduled_at if arrivals else math.nan

    @property
    def ttfo_s(self) -> float:
        """Seconds to the first text that is no reasoning."""
        content_at = self.answer.content_at
        return math.nan if content_at is None else content_at - self.scheduled_at

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.scheduled_at

    def tpot_s(self, output_tokens: int) -> float:
        """Mean time per token after the first; NaN for fewer than two tokens or arrivals."""
        arrivals = self.answer.arrivals
        if output_tokens < 2 or len(arrivals) < 2:
            return math.nan
        return (arrivals[-1] - arrivals[0]) / (output_tokens - 1)

    def gaps(self) -> np.ndarray[Any, Any]:
        """Return the seconds between arrivals of text; the wait for the first is none of them."""
        return np.diff(np.asarray(self.answer.arrivals))

    def output_tokens(self, count: TokenCounter | None) -> tuple[int, str]:
        """Return the tokens of the answer and where the figure is from.

        A usage figure wins, then the tokenizer that the user named, then the number of text
        events. A cut or failed answer has rarely a usage figure. One of 0 beside a text is none:
        some servers write 0 where they do not count.
        """
        answer = self.answer
        if answer.output_tokens is not None and (answer.output_tokens or not answer.arrivals):
            return answer.output_tokens, "usage"
        if count is not None:
            return (count(answer.text) if answer.texts else 0), "tokenizer"
        return answer.num_text_events, "events"

    def input_tokens(self, count: TokenCounter | None) -> int | None:
        told = self.answer.input_tokens or None  # no prompt has 0 tokens
        if told is not None or count is None or self.prompt_text is None:
            return told
        return count(self.prompt_text)

    def is_valid(self) -> bool | None:
        """True where the answer is what the turn wants, by its schema: JSON, or calls of tools
        that it was given. None: any text."""
        if self.turn.expects == "text":
            return None
        if self.answer.finish_reason == "length":
            return False
        if self.turn.expects == "tool_call":
            return are_valid_calls(self.answer.calls.values(), self.turn.fields)
        return is_valid_json("".join(self.answer.contents), self.turn.fields)
