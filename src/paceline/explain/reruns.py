"""Reruns: what a change makes of each percentile, by simulating the recorded load anew."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from paceline.explain.causes import Finding
from paceline.explain.proposal import Effect, Predict
from paceline.explain.situation import Situation

_NOT_SIMULATED = ("reader", "upload", "models")  # causes that no schedule changes


def rerun(*, finds_all: bool = False, **changes: Any) -> Effect:
    """Return the effect of a server with these facts changed, which may find all that repeats.

    A percentile moves as it does from the simulation of the run as it was to that of the changed
    one, so that an error of the costs that both have in common cancels out. Where the first is far
    above what was measured that ratio promises too much: a percentile falls below the second only
    if it was there before.
    """

    def effect(situation: Situation) -> Predict:
        before, server = situation.simulated, situation.server
        after = None
        if server is not None:
            after = situation.simulate(replace(server, **changes), finds_all=finds_all)

        def predict(finding: Finding) -> float:
            rest_ms = sum(finding.causes.get(cause, 0.0) for cause in _NOT_SIMULATED)
            moving_ms = finding.value_ms - rest_ms
            old_ms = None if before is None else before.at(finding.metric, finding.percentile)
            new_ms = None if after is None else after.at(finding.metric, finding.percentile)
            if not old_ms or new_ms is None:
                return finding.value_ms
            return rest_ms + max(moving_ms * new_ms / old_ms, min(new_ms, moving_ms))

        return predict

    return effect
