"""A load's window: it ends with what comes first."""

import asyncio
import io
import json
import re
import time
import tracemalloc
from typing import Any

import pytest

from paceline.bench import load
from paceline.bench.arrivals import Closed, build_arrivals
from paceline.bench.engine_terminal import print_offline
from paceline.bench.http import Origin
from paceline.bench.load import Limits
from paceline.bench.objective import Objectives, parse_objectives
from paceline.bench.recorder import Window
from paceline.bench.stage import Plan, Session
from paceline.bench.target import Target
from paceline.bench.terminal import print_report, report_console
from paceline.bench.workloads import build_workload
from tests.fake_server import DONE, FINISH, ROLE, FakeServer, Script, delta, steady, usage

GOOD = steady(ttft_ms=10, gap_ms=1, tokens=2)


def summary(
    arrivals, limits: Limits, script: Script = GOOD, *, name: str = "a", slo: str = "",
    write_line=None,
) -> dict[str, Any]:  # fmt: skip
    objectives = parse_objectives([slo] if slo else [])
    plan = Plan(workload=build_workload("synthetic:input=4"), objectives=objectives,
                limits=limits)  # fmt: skip
    with FakeServer(lambda number, body: script) as server:
        target = Target(name=name, origin=Origin.parse(server.url), model="fake")
        return asyncio.run(Session(write_line=write_line).run(plan, target, arrivals)).summary


@pytest.mark.parametrize("arrivals", [Closed(2), build_arrivals("constant", 50.0)])
def test_the_window_ends_with_the_count_where_that_comes_before_the_duration(arrivals):
    found = summary(arrivals, Limits(num_requests=6, duration_s=3600.0))
    assert found["requests"]["ok"] == 6
    assert found["window_s"] < 3600
    assert found["throughput"]["requests_per_s"] == pytest.approx(6 / found["window_s"])


def test_the_window_ends_with_the_trace_where_that_comes_before_the_duration(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"at_s": at}) + "\n" for at in (0.0, 0.1)))
    found = summary(build_arrivals(f"replay:file={path}", None), Limits(duration_s=3600.0))
    assert found["requests"]["ok"] == 2
    assert found["window_s"] < 3600


def test_the_window_ends_with_the_duration_where_that_comes_first():
    found = summary(build_arrivals("constant", 5.0), Limits(num_requests=900, duration_s=0.5))
    assert found["window_s"] == pytest.approx(0.5)


def test_a_run_that_ends_in_its_warm_up_has_no_duration():
    assert Window(start=10.0, end=4.0).duration_s == 0


def test_an_answer_that_came_all_at_once_has_no_time_per_token_and_misses_its_objective():
    choice = b'{"choices":[{"message":{"content":"hi there"},"finish_reason":"stop"}],'
    usage = b'"usage":{"prompt_tokens":3,"completion_tokens":%d}}'
    for num_tokens, num_met in ((64, 0), (1, 2)):
        whole = Script(((10, choice + usage % num_tokens),),
                       headers=(("Content-Type", "application/json"),))  # fmt: skip
        for metric in ("tpot", "itl"):
            limits = Limits(num_requests=2)
            stage = summary(Closed(1), limits, whole, slo=f"{metric}=10s")
            assert stage["requests"]["ok"] == 2
            assert stage["latency_ms"]["tpot"] == {"count": 0}
            assert stage["goodput"]["met"] == num_met


def test_latency_counts_from_the_moment_at_which_a_request_was_due_and_not_from_its_sending():
    """Of four requests that are due 10 ms apart each waits for the one before, 200 ms."""
    lines: list[dict[str, Any]] = []
    slow = steady(ttft_ms=200, gap_ms=0, tokens=1)
    limits = Limits(num_requests=4, max_open=1)
    summary(build_arrivals("constant", 100.0), limits, slow, write_line=lines.append)
    assert [line["outcome"] for line in lines] == ["ok"] * 4
    for idx, line in enumerate(lines):
        planned_ms = 200 * (idx + 1) - 10 * idx
        assert line["ttft_ms"] >= planned_ms - 1
        assert line["e2e_ms"] >= planned_ms - 1
        assert line["lag_ms"] >= 200 * idx - 10 * idx - 1


def printed(**document: Any) -> str:
    console = report_console(io.StringIO())
    print_report({"stages": [], "interrupted": False, **document}, console)
    return console.file.getvalue()


def test_a_servers_error_is_text_and_no_markup_in_the_report():
    failing = Script(((0, b'{"error":{"message":"[/red] [bold]no"}}'),), status=500)
    stage = summary(Closed(1), Limits(num_requests=1), failing)
    shown = printed(stages=[stage]) + printed(stages=[stage, stage])
    assert shown.count("1 x error: HTTP 500: [/red] [bold]no") == 3


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":smile:", "[link=a]"])
def test_names_are_text_and_no_markup_in_the_report(name, monkeypatch):
    stage = summary(Closed(1), Limits(num_requests=2), name=name)
    (figures,) = stage["classes"].values()
    stage["classes"] = {name: figures, "other": figures}
    stage["server_ms"] = {name: stage["latency_ms"]["ttft"]}
    stage["client"] |= {"is_bottleneck": True, "reasons": [name]}
    stage["goodput"] = figures["goodput"] = {
        **stage["goodput"], "objectives_ms": {"": {"ttft": 9.0}}, "cut": 0, "met": 1, "missed": 0,
        "attainment": {"value": 1.0, "low": 0.2, "high": 1.0}, "requests_per_s": 1.0,
    }  # fmt: skip
    alone = printed(stages=[stage])
    for line in (f"{name}: 2 requests", f"{name} TTFT", f"server: {name}", f"goodput, {name}:",
                 f"{name}: the client was the bottleneck: {name}. "):  # fmt: skip
        assert line in alone
    search = {"target": name, "at_least": 0.9, "rate": 1.0, "held_not_at": None}
    row = {"rate": 1.0, "metric": "ttft", "unit": "ms", "first": name, "other": "b",
           "first_median": 1.0, "other_median": 2.0, "verdict": name,
           "first_answered": 1.0, "other_answered": 0.5, "runs_with_a_late_client": 0,
           "ratio": {"value": 0.5, "low": 0.4, "high": 0.6}}  # fmt: skip
    none_held, nothing = {**search, "rate": None, "held_not_at": 2.0}, {**search, "rate": None}
    together = printed(
        searches=[search, none_held, nothing],
        stages=[stage, {**stage, "target": "b"}], comparison=[row],
        knees={name: 1.0},
    )  # fmt: skip
    for line in (
        f"\n{name} ",
        f"{name} is better",
        f"{name}: at least 90 %",
        f"{name}: at no rate tried",
        f"{name}: the search ended before a rate was judged",
        f"{name} keeps up with 1",
        f"at 1/s {name} answered 100 % of its requests, b 50 %",
        "0.50 [0.40, 0.60]",
    ):
        assert line in together
    monkeypatch.setattr("sys.stdout", offline := io.StringIO())
    print_offline({"model": name, "isa": "scalar", "num_threads": 1, "preemptions": 0, "rows": [],
                   "interrupted": False})  # fmt: skip
    assert offline.getvalue().startswith(f"{name}, scalar, 1 threads")


SLOWLY = steady(ttft_ms=100, gap_ms=10, tokens=3)


@pytest.mark.parametrize("arrivals", [Closed(2), build_arrivals("constant", 4.0)])
@pytest.mark.parametrize("workload", ["synthetic:input=4", "chat:turns=20,max_context=100000"])
def test_nothing_is_sent_once_the_duration_is_over_though_answers_may_still_come(
    arrivals, workload
):
    lines: list[dict[str, Any]] = []
    limits = Limits(duration_s=1.0, drain_s=60.0)
    plan = Plan(workload=build_workload(workload), objectives=Objectives({}), limits=limits)
    with FakeServer(lambda number, body: SLOWLY) as server:
        target = Target(name="a", origin=Origin.parse(server.url), model="fake")
        asyncio.run(Session(write_line=lines.append).run(plan, target, arrivals))
    assert len(lines) == len(server.served) > 0
    for line in lines:
        assert line["scheduled_s"] < 1.0
        assert line["outcome"] == "ok"


def test_a_user_that_a_server_told_to_come_back_later_is_not_waited_for_after_the_duration():
    full = Script(((0, b'{"error":{"message":"full"}}'),), status=429,
                  headers=(("Content-Type", "application/json"), ("Retry-After", "9")))  # fmt: skip
    found = summary(Closed(2), Limits(duration_s=0.5, drain_s=60.0), full)
    assert (found["requests"]["refused"], found["requests"]["measured"]) == (2, 2)


def test_requests_that_were_due_and_never_sent_are_misses():
    hanging = Script(((0, ROLE),), end="hang")
    limits = Limits(duration_s=1.0, max_open=3)
    stage = summary(build_arrivals("constant", 50.0), limits, hanging)
    requests, goodput = stage["requests"], stage["goodput"]
    unsent = requests["unsent"]
    assert requests["cut"] + unsent == 50
    assert requests["cut"] <= 3
    assert (goodput["met"], goodput["missed"], goodput["cut"]) == (0, unsent, requests["cut"])
    assert goodput["attainment"]["value"] == 0
    assert stage["offered_per_s"] == pytest.approx(50)
    assert f"{unsent} requests that were due were not sent" in stage["client"]["reasons"]
    stage["goodput"] = {**goodput, "objectives_ms": {"all": {"ttft": 9.0}}}
    shown = printed(stages=[stage])
    assert f"{unsent} more were due and not sent" in shown
    assert f"within the objective 0 of {unsent}" in shown


def test_a_class_without_an_objective_has_no_goodput_of_its_own():
    stage = summary(Closed(1), Limits(num_requests=2), slo="x:e2e=9s")
    (without,) = stage["classes"].values()
    stage["classes"]["x"] = {**without, "goodput": stage["goodput"]}
    shown = printed(stages=[stage])
    assert "goodput, all: " in shown
    assert "goodput, x: " in shown
    assert "goodput, synthetic: " not in shown


def test_a_burst_is_due_as_a_whole_and_never_more_than_was_asked_for():
    hanging = Script(((0, ROLE),), end="hang")
    limits = Limits(num_requests=9, duration_s=0.5, max_open=2)
    stage = summary(build_arrivals("burst", None), limits, hanging)
    assert stage["requests"]["cut"] + stage["requests"]["unsent"] == 9
    assert stage["requests"]["cut"] <= 2


def test_a_rate_that_no_client_can_send_is_counted_to_its_end(monkeypatch):
    monkeypatch.setattr(load, "_MAX_COUNTED", 1000)
    hanging = Script(((0, ROLE),), end="hang")
    limits = Limits(duration_s=0.5, max_open=2)
    stage = summary(build_arrivals("constant", 1e6), limits, hanging)
    assert stage["requests"]["unsent"] == pytest.approx(500_000, rel=0.01)


@pytest.mark.parametrize("script", [SLOWLY, Script(((0, ROLE),), end="hang")])
def test_what_was_sent_in_time_leaves_nothing_unsent(script):
    stage = summary(build_arrivals("constant", 5.0), Limits(num_requests=4, timeout_s=1.0), script)
    assert (stage["requests"]["measured"], stage["requests"]["unsent"]) == (4, 0)


def test_events_without_usage_count_the_tokens_of_events_with_it():
    four = tuple((10 * i, delta(content="a b c d")) for i in range(1, 6))
    whole, cut = Script((*four, (60, FINISH + usage(3, 20) + DONE))), Script(four, end="hang")
    plan = Plan(workload=build_workload("synthetic:input=4"), objectives=Objectives({}),
                limits=Limits(num_requests=4, timeout_s=8.0))  # fmt: skip
    with FakeServer(lambda number, body: cut if number == 3 else whole) as server:
        target = Target(name="a", origin=Origin.parse(server.url), model="fake")
        stage = asyncio.run(Session().run(plan, target, Closed(1))).summary
    assert (stage["requests"]["ok"], stage["requests"]["timeout"]) == (3, 1)
    assert stage["throughput"]["output_tokens"] == pytest.approx(4 * 20)
    # All four prompts have four words, and were read: the one without usage by its bytes.
    assert stage["throughput"]["input_tokens"] == pytest.approx(4 * 3, rel=0.02)


def test_input_that_nobody_counts_is_unknown_and_not_zero():
    silent = Script(((0, ROLE), (10, delta(content="a")), (20, FINISH + DONE)))
    stage = summary(Closed(1), Limits(num_requests=2), silent)
    rates = stage["throughput"]
    assert rates["output_tokens"] == 2
    assert [rates[name] for name in ("input_tokens", "input_tokens_per_s")] == [None, None]
    assert rates["total_tokens_per_s"] is None
    assert "input tok/s unknown" in printed(stages=[stage])
    assert summary(Closed(1), Limits(num_requests=2))["throughput"]["input_tokens"] == 14


def test_kinds_of_errors_beyond_the_tenth_are_summed():
    def fail(number, body):
        words = b'{"error":{"message":"req %d failed"}}' % number
        return Script(((0, words),), status=500)

    plan = Plan(workload=build_workload("synthetic:input=4"), objectives=Objectives({}),
                limits=Limits(num_requests=15))  # fmt: skip
    with FakeServer(fail) as server:
        target = Target(name="a", origin=Origin.parse(server.url), model="fake")
        errors = asyncio.run(Session().run(plan, target, Closed(1))).summary["errors"]
    assert [error["count"] for error in errors] == [1] * 10 + [5]
    assert "5 other kinds" in errors[-1]["what"]


def test_open_requests_are_counted_while_they_are_open():
    stage = summary(Closed(3), Limits(num_requests=9), steady(ttft_ms=60, gap_ms=20, tokens=3))
    assert stage["concurrency"]["peak"] == 3
    assert 1 < stage["concurrency"]["mean"] <= 3
    shown = printed(stages=[stage])
    assert "requests open on average, 3 at most" in shown
    assert "input 7.0 (7 to 7), output 3.0 (3 to 3)" in shown


def test_the_report_says_whose_tokens_it_counts():
    cut = steady(ttft_ms=10, gap_ms=10, tokens=1)
    hanging = Script(cut.steps[:2], end="hang")
    stage = summary(Closed(2), Limits(duration_s=0.5), hanging)
    assert stage["throughput"]["output_tokens_of"] == {"cut": 2}
    shown = printed(stages=[stage])
    assert "counts 2 tokens that came in the window, among them 2 of requests that the" in shown
    waits = "most were still open at the end: --drain 60s waits for them"
    assert waits in shown
    assert waits not in printed(stages=[{**stage, "interrupted": True}])


def test_a_table_of_several_stages_shows_what_was_cut_and_what_one_stage_alone_would_tell():
    silent = Script((*SLOWLY.steps[:-1], (0, FINISH + DONE)))
    stage = summary(Closed(2), Limits(num_requests=2), silent)
    counts = {"cut": 7, "measured": 9, "unsent": 3, "checked": 2, "valid": 1}
    cut = {**stage, "requests": {**stage["requests"], **counts},
           "price": {"cost_per_million_output_tokens": 3.5}}  # fmt: skip
    shown = printed(stages=[stage, cut])
    titles, row = shown.splitlines()[:2]
    assert "failed  cut  unsent  TTFT" in titles
    assert row.split()[2:7] == ["2", "4", "0", "7", "3"]
    assert shown.count(": 2 answers came without usage") == 2
    assert shown.count(": valid answers: 1 of 2") == 1
    assert shown.count(": cost per million output tokens: 3.5") == 1
    assert "cut" not in printed(stages=[stage, stage])


def test_a_narrow_terminal_gets_every_title_of_a_table_of_several_stages_whole():
    stage = summary(Closed(1), Limits(num_requests=1), slo="ttft=1s")
    wide, narrow = report_console(io.StringIO()), report_console(io.StringIO())
    narrow.width = 80
    for console in (wide, narrow):
        print_report({"stages": [stage, stage], "interrupted": False}, console)
    once, twice = wide.file.getvalue(), narrow.file.getvalue()
    titles, *halves = (
        re.split("  +", line.strip())
        for line in (once + twice).splitlines()
        if line.startswith("target")
    )
    assert sorted(halves[0] + halves[1]) == sorted([*titles, "target", "rate"])
    assert max(map(len, twice.splitlines())) <= 80
    assert "…" not in twice


def test_the_first_text_that_is_no_reasoning_has_a_row_where_answers_reason():
    reasoning = Script(((10, delta(reasoning_content="hm")), (40, delta(content="a")),
                        (40, FINISH + usage(7, 2) + DONE)))  # fmt: skip
    stage = summary(Closed(1), Limits(num_requests=2), reasoning)
    latency = stage["latency_ms"]
    assert latency["ttfo"]["min"] > latency["ttft"]["max"]
    assert "TTFO" in printed(stages=[stage])
    assert "TTFO" not in printed(stages=[summary(Closed(1), Limits(num_requests=2))])


@pytest.mark.parametrize("arrivals", [Closed(1), build_arrivals("constant", 20.0)])
def test_an_event_loop_that_is_blocked_makes_the_client_the_bottleneck(arrivals):
    """Whoever blocks it for 60 ms again and again is told of, and the figures are not trusted."""

    def block(line: dict[str, Any]) -> None:
        time.sleep(0.06)

    stage = summary(arrivals, Limits(num_requests=20), write_line=block)
    client = stage["client"]
    assert client["is_bottleneck"]
    assert client["loop_lag_ms"]["max"] > 30
    assert any(reason.startswith("its event loop lagged by") for reason in client["reasons"])
    assert "a: the client was the bottleneck" in printed(stages=[stage])


def test_a_load_keeps_a_few_hundred_bytes_of_a_request_and_nothing_of_a_token(monkeypatch):
    texts = delta(content="x" * 20)
    peaks = []

    async def answer_at_once(origin, request, answer) -> float:
        answer.on_connected(now := time.perf_counter())
        answer.on_head(200, {"content-type": "text/event-stream"}, now)
        for number in range(num_texts):
            answer.on_body(texts, now + 1e-6 * number)
        answer.on_body(FINISH + usage(7, num_texts) + DONE, now + 1e-6 * num_texts)
        await asyncio.sleep(0)
        return now + 1e-6 * num_texts

    monkeypatch.setattr(load, "send", answer_at_once)
    target = Target(name="a", origin=Origin.parse("127.0.0.1:9"), model="fake")
    for num_requests, num_texts in ((20, 100), (20, 2000), (300, 100)):
        plan = Plan(workload=build_workload("synthetic:input=4"), objectives=Objectives({}),
                    limits=Limits(num_requests=num_requests))  # fmt: skip
        tracemalloc.start()
        stage = asyncio.run(Session().run(plan, target, Closed(2))).summary
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert stage["throughput"]["output_tokens"] == pytest.approx(num_requests * num_texts)
    few, long, many = peaks
    assert long - few < 1_000_000  # of the answers that are open, and of the slowest ones' lines
    assert (many - few) / 280 < 4_000
