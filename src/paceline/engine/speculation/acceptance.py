"""Acceptance: how often guesses of a kind are right, in one sequence and in all."""

from __future__ import annotations

from collections.abc import Callable

_WEIGHT = 3.0  # observations that the estimate fallen back on counts as


class Acceptance:
    """Faded counts of right guesses by kind; what was seen seldom leans on `fallback`."""

    def __init__(self, num_kinds: int, fallback: Callable[[int], float], *, forget: float) -> None:
        self._right = [0.0] * num_kinds
        self._seen = [0.0] * num_kinds
        self._fallback = fallback
        self._forget = forget  # weight of an observation one observation later

    def chance(self, kind: int) -> float:
        return (self._right[kind] + _WEIGHT * self._fallback(kind)) / (self._seen[kind] + _WEIGHT)

    def observe(self, kind: int, is_right: bool) -> None:
        self._right[kind] = self._right[kind] * self._forget + is_right
        self._seen[kind] = self._seen[kind] * self._forget + 1
