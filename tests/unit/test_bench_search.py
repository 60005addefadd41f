"""The search for a rate: where it goes, and where it ends."""

import asyncio

import pytest

from paceline.bench.arrivals import Constant
from paceline.bench.course import Limits
from paceline.bench.http import Origin
from paceline.bench.objective import parse_objectives
from paceline.bench.search import find_rate
from paceline.bench.stage import Plan, StageResult
from paceline.bench.target import Target
from paceline.bench.workloads import build_workload


class Scripted:
    """A session whose stages hold up to a rate, and have so many requests open at most."""

    is_interrupted = False

    def __init__(self, holds_to: float, peak: int) -> None:
        self._holds_to, self._peak = holds_to, peak

    async def run(self, plan, target, arrivals, *, labels, max_missed) -> StageResult:
        is_held = labels["rate"] <= self._holds_to
        goodput = {"attainment_if_cut_missed": float(is_held), "missed": 0 if is_held else 99}
        summary = {**labels, "goodput": goodput, "concurrency": {"peak": self._peak}}
        return StageResult(summary=summary, plots={})


def rates(session: Scripted) -> list[float]:
    plan = Plan(workload=build_workload("synthetic"), objectives=parse_objectives(["ttft=1s"]),
                limits=Limits(duration_s=5.0))  # fmt: skip
    target = Target(name="a", origin=Origin.parse("127.0.0.1:1"), model="m")
    search = find_rate(session, plan, target, Constant, start=1.0, at_least=0.9)
    return asyncio.run(search).summary()["stages"]


def test_a_search_ends_where_requests_that_are_alone_miss_their_objective():
    assert rates(Scripted(0.0, peak=1)) == [1.0]
    assert len(rates(Scripted(0.0, peak=2))) == 8


def test_a_search_goes_on_below_a_rate_at_which_requests_meet():
    found = rates(Scripted(0.3, peak=2))
    assert found[:3] == [1.0, 0.5, 0.25]
    assert found[-1] == pytest.approx(0.3, rel=0.1)
