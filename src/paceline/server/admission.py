"""Admission: how long the queue is, how long it will take, and who is turned away."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from paceline.server.errors import ApiError

_MEMORY = 0.9  # of each departure from the queue, at the next: the last ten or so count


class _Line(Struct):
    """What one tenant has in the queue."""

    num_requests: int = 0
    num_tokens: int = 0


class Limits(Struct, frozen=True, kw_only=True):
    """What may wait for its first token at a time, and for how long. None is without a limit.

    Half of it is shared out among the tenants, so that each finds room whatever others send.
    """

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
    thread alone. Tenants are served in turns (`paceline.policies.turns`): ahead of a prompt is what
    its tenant has, and no more than that of any other's.
    """

    def __init__(
        self, limits: Limits, *, num_tenants: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._num_tenants = num_tenants
        self._lines: dict[str, _Line] = {}
        self._clock = clock
        self._left_requests = self._left_tokens = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0  # of the last departure, or of the queue's beginning

    def predict_s(
        self, num_requests: int = 0, num_tokens: int = 0, *, tenant: str = ""
    ) -> float | None:
        """Return the time until what a tenant has waiting and more is served; None: no idea.

        By the count of prompts or by their tokens, whichever is sooner: short prompts teach little
        about a long one, and a long one little about short ones.
        """
        if not self._busy_s or not self._left_tokens:
            return None
        requests, tokens = self._by_tenant()
        share = min(
            _ahead(requests, tenant, num_requests) / self._left_requests,
            _ahead(tokens, tenant, num_tokens) / self._left_tokens,
        )
        return share * self._busy_s

    def check(
        self, *, num_requests: int, num_tokens: int, deadline: Deadline | None, tenant: str = ""
    ) -> None:
        """Raise ApiError 429 where the queue has no room, or is too long for the deadline."""
        limits = self.limits
        requests, tokens = self._by_tenant()
        for name, waiting, new, limit in (
            ("prompts", requests, num_requests, limits.max_requests),
            ("prompt tokens", tokens, num_tokens, limits.max_tokens),
        ):
            # Into an empty queue goes what is longer than the limit, too: or it never could.
            if limit is None or not waiting or self._has_room(waiting, tenant, new, limit):
                continue
            of_key = ""
            if self._num_tenants > 1:
                of_key = f", {waiting.get(tenant, 0)} of this key, of which each has its share"
            raise ApiError(
                429, f"the queue is full: {sum(waiting.values())} {name} wait{of_key}, {new} more "
                f"are beyond its {limit}; try again later",
                code="queue_full", retry_after_s=self.predict_s(tenant=tenant) or 1.0,
            )  # fmt: skip
        predicted_s = self.predict_s(num_requests, num_tokens, tenant=tenant)
        if deadline is not None and predicted_s is not None and predicted_s > deadline.left_s:
            raise ApiError(
                429, f"the deadline of {deadline.asked_ms:g} ms cannot be met: the first token "
                f"would take about {predicted_s * 1e3:.0f} ms; try again later",
                code="deadline_unreachable", retry_after_s=predicted_s,
            )  # fmt: skip

    def _by_tenant(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the prompts and the tokens that wait, by tenant."""
        lines = self._lines
        return (
            {tenant: line.num_requests for tenant, line in lines.items()},
            {tenant: line.num_tokens for tenant, line in lines.items()},
        )

    def _has_room(self, waiting: Mapping[str, int], tenant: str, new: int, limit: int) -> bool:
        """Half of the limit is shared out; beyond its share each takes from the other half."""
        share = limit / 2 / self._num_tenants
        after = {**waiting, tenant: waiting.get(tenant, 0) + new}
        return sum(max(num - share, 0) for num in after.values()) <= limit / 2

    def enter(self, num_requests: int, num_tokens: int, *, tenant: str = "") -> None:
        if not self._lines:
            self._since_s = self._clock()
        line = self._lines.setdefault(tenant, _Line())
        line.num_requests += num_requests
        line.num_tokens += num_tokens

    def leave(
        self, num_requests: int, num_tokens: int, *, is_served: bool, tenant: str = ""
    ) -> None:
        """Prompts that entered have their first token, or are given up."""
        line = self._lines[tenant]
        line.num_requests -= num_requests
        line.num_tokens -= num_tokens
        if not line.num_requests:
            del self._lines[tenant]
        if is_served:
            now_s = self._clock()
            self._left_requests = self._left_requests * _MEMORY + num_requests
            self._left_tokens = self._left_tokens * _MEMORY + num_tokens
            self._busy_s = self._busy_s * _MEMORY + now_s - self._since_s
            self._since_s = now_s


def _ahead(waiting: Mapping[str, int], tenant: str, new: int) -> int:
    """Return what is served up to the last of a tenant's: as much of each other, if it has it."""
    own = waiting.get(tenant, 0) + new
    return own + sum(min(num, own) for other, num in waiting.items() if other != tenant)
