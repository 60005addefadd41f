"""Which differences between servers a comparison may call a difference."""

import io
from typing import Any

import pytest

from paceline.bench.compare import compare
from paceline.bench.probe import MAX_CPU_SHARE, MAX_LAG_S
from paceline.bench.terminal import print_report, report_console

IN_TIME = {"count": 9, "p99": {"value": 1e3 * MAX_LAG_S}}
LATE = {"count": 9, "p99": {"value": 1e3 * MAX_LAG_S + 1}}
IN_TIME_CLIENT = {"cpu_share": MAX_CPU_SHARE, "loop_lag_ms": IN_TIME, "send_lag_ms": {"count": 0}}


def stage(target: str, number: int, *, ttft_ms: float, num_ok: int, rate: float) -> dict[str, Any]:
    """Return what a comparison reads of a stage in which 40 requests were due."""
    return {
        "target": target,
        "round": number,
        "requests": {"ok": num_ok, "measured": 38, "unsent": 2},
        "latency_ms": {"ttft": {"count": num_ok, "p50": {"value": ttft_ms + number}}},
        "throughput": {"output_tokens_per_s": rate + number},
        "goodput": {"objectives_ms": {}},
        "client": IN_TIME_CLIENT,
    }


def rows(first: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    stages = [
        stage(name, n, **figures)
        for n in range(4)
        for name, figures in (("a", first), ("b", other))
    ]
    return {row["metric"]: row for row in compare(stages)}


SLOW_BUT_WHOLE = {"ttft_ms": 600, "num_ok": 36, "rate": 90}


@pytest.mark.parametrize("is_swapped", [False, True])
def test_who_answered_fewer_requests_is_not_called_better_by_its_latencies(is_swapped):
    """A server that answers the easy ones and leaves the rest looks quick."""
    picky = {"ttft_ms": 200, "num_ok": 10, "rate": 30}
    pair = (picky, SLOW_BUT_WHOLE) if is_swapped else (SLOW_BUT_WHOLE, picky)
    whole = "b" if is_swapped else "a"
    found = rows(*pair)
    assert found["TTFT p50"]["verdict"] is None
    assert found["output"]["verdict"] == whole
    shares = [found["output"]["first_answered"], found["output"]["other_answered"]]
    assert shares == ([0.25, 0.9] if is_swapped else [0.9, 0.25])


@pytest.mark.parametrize("num_ok", [10, 35, 36])
def test_who_answered_fewer_may_be_called_worse_and_one_of_forty_is_no_difference(num_ok):
    assert (
        rows(SLOW_BUT_WHOLE, {"ttft_ms": 900, "num_ok": num_ok, "rate": 30})["TTFT p50"]["verdict"]
        == "a"
    )
    quick = rows(SLOW_BUT_WHOLE, {"ttft_ms": 200, "num_ok": num_ok, "rate": 30})["TTFT p50"]
    assert quick["verdict"] == (None if num_ok == 10 else "b")


def test_two_rounds_bound_nothing():
    stages = [stage(name, n, ttft_ms=ttft, num_ok=36, rate=1)
              for n in range(2) for name, ttft in (("a", 100), ("b", 900))]  # fmt: skip
    assert {row["verdict"] for row in compare(stages)} == {None}
    assert {row["no_verdict_because"] for row in compare(stages)} == {"it takes 3 rounds"}


@pytest.mark.parametrize(
    "sign", [{"cpu_share": MAX_CPU_SHARE + 0.01}, {"loop_lag_ms": LATE}, {"send_lag_ms": LATE}]
)
@pytest.mark.parametrize("late", [0, 5])
def test_a_run_whose_client_was_late_judges_no_server_and_the_report_says_so(sign, late):
    stages = [{**stage(name, n, ttft_ms=ttft, num_ok=36, rate=rate), "rate": rate}
              for rate in (1.0, 2.0) for n in range(3)
              for name, ttft in (("a", 100), ("b", 900))]  # fmt: skip
    sure = compare(stages)
    assert {(row["metric"], row["verdict"]) for row in sure} == {
        ("TTFT p50", "a"),
        ("output", None),
    }
    assert [row["no_verdict_because"] for row in sure] == [None, "the interval holds 1"] * 2
    stages[late]["client"] = {**IN_TIME_CLIENT, **sign}
    found = compare(stages)
    at_first, at_second = found[:2], found[2:]
    assert {row["verdict"] for row in at_first} == {None}
    assert {row["no_verdict_because"] for row in at_first} == {"the client was the bottleneck"}
    assert at_second == sure[2:]  # where the client was in time the verdict stands
    console = report_console(io.StringIO())
    print_report({"stages": [], "interrupted": False, "comparison": found}, console)
    line = "at 1/s a and b: no verdict, as the client was the bottleneck in 1 of the runs"
    assert console.file.getvalue().count(line) == 1
    assert "at 2/s a and b" not in console.file.getvalue()
