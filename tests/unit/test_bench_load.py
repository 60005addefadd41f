"""A load's window: it ends with what comes first."""

import asyncio
import io
import json
from typing import Any

import pytest
from rich.console import Console

from paceline.bench.arrivals import Closed, build_arrivals
from paceline.bench.http import Origin
from paceline.bench.load import Limits
from paceline.bench.objective import Objectives
from paceline.bench.recorder import Window
from paceline.bench.stage import Plan, Session
from paceline.bench.target import Target
from paceline.bench.terminal import print_report
from paceline.bench.workloads import build_workload
from tests.fake_server import FakeServer, Script, steady

GOOD = steady(ttft_ms=10, gap_ms=1, tokens=2)


def summary(arrivals, limits: Limits, script: Script = GOOD) -> dict[str, Any]:
    plan = Plan(workload=build_workload("synthetic:input=4"), objectives=Objectives({}),
                limits=limits)  # fmt: skip
    with FakeServer(lambda number, body: script) as server:
        target = Target(name="a", origin=Origin.parse(server.url), model="fake")
        return asyncio.run(Session().run(plan, target, arrivals)).summary


@pytest.mark.parametrize("arrivals", [Closed(2), build_arrivals("constant", 50.0)])
def test_the_window_ends_with_the_count_where_that_comes_before_the_duration(arrivals):
    found = summary(arrivals, Limits(num_requests=6, duration_s=60.0))
    assert found["requests"]["ok"] == 6
    assert found["window_s"] < 5
    assert found["throughput"]["requests_per_s"] > 1


def test_the_window_ends_with_the_trace_where_that_comes_before_the_duration(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"at_s": at}) + "\n" for at in (0.0, 0.1)))
    found = summary(build_arrivals(f"replay:file={path}", None), Limits(duration_s=60.0))
    assert found["requests"]["ok"] == 2
    assert found["window_s"] < 5


def test_the_window_ends_with_the_duration_where_that_comes_first():
    found = summary(build_arrivals("constant", 5.0), Limits(num_requests=900, duration_s=0.5))
    assert found["window_s"] == pytest.approx(0.5)


def test_a_run_that_ends_in_its_warm_up_has_no_duration():
    assert Window(start=10.0, end=4.0).duration_s == 0


def test_a_servers_error_is_text_and_no_markup_in_the_report():
    failing = Script(((0, b'{"error":{"message":"[/red] [bold]no"}}'),), status=500)
    stage = summary(Closed(1), Limits(num_requests=1), failing)
    console = Console(file=io.StringIO(), width=200)
    for stages in ([stage], [stage, stage]):
        print_report({"stages": stages, "interrupted": False}, console)
    assert console.file.getvalue().count("1 x error: HTTP 500: [/red] [bold]no") == 3
