"""Objectives: the latency that was promised, by class of request."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.bench.units import parse_span
from paceline.errors import ParameterError

METRICS = ("ttft", "tpot", "e2e", "itl")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds by class; "" holds for the classes that have none of their own."""

    limits: dict[str, dict[str, float]]

    def of(self, kind: str) -> dict[str, float]:
        return self.limits.get(kind) or self.limits.get("", {})

    def is_met(self, kind: str, measured: dict[str, float], *, is_at_once: bool) -> bool:
        """True where each limit of the class holds.

        An answer without text never had a first token and misses a TTFT limit. An answer of one
        token has neither TPOT nor gaps, and keeps theirs; one that `is_at_once`, several tokens in
        one event, has neither, and misses theirs: it did not stream. `measured` is NaN where there
        is none.
        """
        for metric, limit in self.of(kind).items():
            value = measured[metric]
            if math.isnan(value):
                if metric == "ttft" or is_at_once:
                    return False
            elif value > limit:
                return False
        return True

    def __bool__(self) -> bool:
        return bool(self.limits)


def parse_objectives(specs: Sequence[str]) -> Objectives:
    """Return the objectives of specs such as "ttft=300ms,tpot=50ms" or "long:e2e=20s"."""
    limits: dict[str, dict[str, float]] = {}
    for spec in specs:
        kind, colon, rest = spec.rpartition(":")
        if colon and not kind:
            raise ParameterError(f"{spec!r} names no class before its colon")
        if kind in limits:
            whose = f"class {kind!r}" if kind else "all classes"
            raise ParameterError(f"two objectives for {whose}: join them with commas")
        limits[kind] = {}
        for metric, limit in (_limit(item, spec) for item in rest.split(",")):
            if metric in limits[kind]:
                raise ParameterError(f"{spec!r} names {metric} twice: leave one of the two out")
            limits[kind][metric] = limit
    return Objectives(limits)


def check_classes(objectives: Objectives, kinds: Collection[str]) -> None:
    """Refuse an objective for a class that no request of the workload has."""
    for kind in objectives.limits:
        if kind and kind not in kinds:
            raise ParameterError(
                f"--slo names the class {kind!r}, which the workload does not have: its classes "
                f"are {', '.join(sorted(kinds))}"
            )


def _limit(item: str, spec: str) -> tuple[str, float]:
    metric, equals, value = item.strip().partition("=")
    if metric not in METRICS or not equals:
        raise ParameterError(
            f"{item!r} in {spec!r} is no objective: write METRIC=DURATION with one of "
            f"{', '.join(METRICS)}, such as ttft=300ms,tpot=50ms"
        )
    return metric, parse_span(value, f"{metric} in {spec!r}")
