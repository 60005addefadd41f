"""Admission: how long the queue is, how long it will take, and who is turned away."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct

from paceline.server.errors import ApiError

_MEMORY = 0.9  # of each departure from the queue, at the next: the last ten or so count


class Limits(Struct, frozen=True, kw_only=True):
    """What may wait for its first token at a time, and for how long. None is without a limit."""

    max_requests: int | None = None
    max_tokens: int | None = None  # of prompts
    timeout_s: float | None = None


class Deadline(Struct, frozen=True):
    """When an answer must be whole: as the client said it, and what is left of it."""

    asked_ms: float
    left_s: float


class Admission:
    """Counts the prompts that wait for their first token and learns how fast they go.

    The rates are those at which prompts and tokens left the queue while it was not empty, so they
    hold whatever made them wait: computing prompts, seats, or KV memory. Used by the event loop's
    thread alone.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.num_requests = 0
        self.num_tokens = 0
        self._clock = clock
        self._left_requests = self._left_tokens = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0  # of the last departure, or of the queue's beginning

    def predict_s(self, num_requests: int = 0, num_tokens: int = 0) -> float | None:
        """Return the time until all that waits and so much more is served; None: no idea.

        By the count of prompts or by their tokens, whichever is sooner: short prompts teach little
        about a long one, and a long one little about short ones.
        """
        if not self._busy_s or not self._left_tokens:
            return None
        share = min(
            (self.num_requests + num_requests) / self._left_requests,
            (self.num_tokens + num_tokens) / self._left_tokens,
        )
        return share * self._busy_s

    def check(self, *, num_requests: int, num_tokens: int, deadline: Deadline | None) -> None:
        """Raise ApiError 429 where the queue has no room, or is too long for the deadline."""
        limits = self.limits
        for name, waiting, new, limit in (
            ("prompts", self.num_requests, num_requests, limits.max_requests),
            ("prompt tokens", self.num_tokens, num_tokens, limits.max_tokens),
        ):
            # Into an empty queue goes what is longer than the limit, too: or it never could.
            if limit is not None and waiting and waiting + new > limit:
                raise ApiError(
                    429, f"the queue is full: {waiting} {name} wait, {new} more are beyond its "
                    f"{limit}; try again later",
                    code="queue_full", retry_after_s=self.predict_s() or 1.0,
                )  # fmt: skip
        predicted_s = self.predict_s(num_requests, num_tokens)
        if deadline is not None and predicted_s is not None and predicted_s > deadline.left_s:
            raise ApiError(
                429, f"the deadline of {deadline.asked_ms:g} ms cannot be met: the first token "
                f"would take about {predicted_s * 1e3:.0f} ms; try again later",
                code="deadline_unreachable", retry_after_s=predicted_s,
            )  # fmt: skip

    def enter(self, num_requests: int, num_tokens: int) -> None:
        if not self.num_requests:
            self._since_s = self._clock()
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def leave(self, num_requests: int, num_tokens: int, *, is_served: bool) -> None:
        """Prompts that entered have their first token, or are given up."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        if is_served:
            now_s = self._clock()
            self._left_requests = self._left_requests * _MEMORY + num_requests
            self._left_tokens = self._left_tokens * _MEMORY + num_tokens
            self._busy_s = self._busy_s * _MEMORY + now_s - self._since_s
            self._since_s = now_s
