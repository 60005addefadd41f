"""A run's figures, from answers that come at planned moments: the truth is known to the digit."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.bench.answer import Answer
from paceline.bench.conversation import Turn
from paceline.bench.exchange import Exchange
from paceline.bench.objective import parse_objectives
from paceline.bench.plots import plot_data
from paceline.bench.probe import Probe
from paceline.bench.recorder import Recorder
from paceline.bench.summary import Price, summarise_run
from tests.fake_server import DONE, EMPTY, FINISH, ROLE, delta, event, usage

EPOCH, START, END = 100.0, 101.0, 111.0  # a second of warm-up, ten that count
TEXT = delta(content="x")
THOUGHT = delta(reasoning_content="hm")
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream"}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request due at `at` s, whose packets come `packets` s after that, as an end at `ends`."""

    at: float
    packets: tuple[tuple[float, bytes], ...] = ()
    ends: float
    tokens: int = 0  # of output
    status: int = 200
    headers: dict | None = None
    outcome: str | None = None  # that the client, not the answer, knows of
    is_warmup: bool = False


def texts(*moments: float, last: bytes = FINISH, count: int | None = None) -> tuple:
    known = usage(7, len(moments) if count is None else count)
    return ((0.01, ROLE), *((at, TEXT) for at in moments), (moments[-1], last + known + DONE))


LEDGER = {"parts_ms": {"queue": 40, "admission": 1, "decode": 200}}
GOOD = [  # fast, slow, a burst of four tokens a packet, empty chunks, a stall, reasoning first
    Planned(at=1.0, packets=texts(0.10, 0.12, 0.14), ends=0.14, tokens=3),
    Planned(at=1.5, packets=texts(2.0, 2.2, 2.6, 2.7), ends=2.7, tokens=4),
    Planned(at=2.0, packets=((0.3, TEXT * 4), (0.5, TEXT * 4 + FINISH + usage(9, 8) + DONE)),
            ends=0.5, tokens=8),
    Planned(at=2.5, packets=((0.05, EMPTY), *texts(0.2, 0.3)), ends=0.3, tokens=2),
    Planned(at=3.0, packets=texts(0.1, 0.2, 1.7, 1.8), ends=1.8, tokens=4),
    Planned(at=4.0, packets=((0.1, THOUGHT), *texts(0.4, 0.5, count=3)), ends=0.5, tokens=3),
    Planned(at=4.5, packets=((0.1, TEXT), (0.1, FINISH), (0.1, event(
        choices=[], usage={"prompt_tokens": 5, "completion_tokens": 1, "paceline": LEDGER})),
        (0.1, DONE)), ends=0.1, tokens=1),
]  # fmt: skip
NO_USAGE = Planned(at=5.0, packets=((0.1, TEXT), (0.3, TEXT + FINISH + DONE)), ends=0.3, tokens=2)
BAD = [
    Planned(at=5.5, status=429, headers={**JSON, "retry-after": "3"}, ends=0.02,
            packets=((0.02, b'{"error":{"message":"full"}}'),)),
    Planned(at=6.0, status=500, headers=JSON, ends=0.03, packets=((0.03, b"{}"),)),
    Planned(at=6.5, packets=((0.2, TEXT), (0.4, event(error={"message": "oom"}))), ends=0.4,
            tokens=1),
    Planned(at=7.0, packets=((0.2, TEXT),), ends=0.3, tokens=1, outcome="broken"),
    Planned(at=7.5, packets=((0.2, TEXT),), ends=3.0, tokens=1, outcome="timeout"),
]  # fmt: skip
CUT = Planned(at=10.5, packets=((0.1, TEXT), (0.3, TEXT)), ends=0.5, tokens=2, outcome="cut")
WARM = Planned(at=0.5, packets=texts(0.2, 0.6), ends=0.6, tokens=2, is_warmup=True)
OK = [*GOOD, NO_USAGE]
ALL = [WARM, *OK, *BAD, CUT]


def recorded(planned: list[Planned], slo: str) -> Recorder:
    recorder = Recorder(parse_objectives([slo]))
    recorder.epoch = EPOCH
    recorder.window.start, recorder.window.end = START, END
    for number, plan in enumerate(planned):
        due = EPOCH + plan.at
        answer = Answer(keeps_text=False)
        turn = Turn(messages=(), max_tokens=9)
        made = Exchange(idx=number, kind="x", turn_idx=0, turn=turn, answer=answer,
                        scheduled_at=due, is_warmup=plan.is_warmup)  # fmt: skip
        made.sent_at = due
        answer.on_connected(due)
        answer.on_head(plan.status, plan.headers or STREAM, due)
        for at, data in plan.packets:
            answer.on_body(data, due + at)
        made.close(due + plan.ends, plan.outcome, plan.outcome)
        recorder.add(made)
    return recorder


def summary(planned: list[Planned], slo: str = "ttft=350ms,e2e=1s") -> dict:
    return summarise_run(recorded(planned, slo), Probe(), Price())


def arrivals(plan: Planned) -> list[float]:
    """The moments, from due, of packets that bring text."""
    return sorted({at for at, data in plan.packets if b'"x"' in data or b'"hm"' in data})


def assert_distribution(found: dict, values: list[float], *, is_binned: bool = False) -> None:
    """Every figure is that of numpy over the true values; a histogram's within half a percent."""
    assert found["count"] == len(values)
    assert found["mean"]["value"] == pytest.approx(np.mean(values))
    assert found["std"] == pytest.approx(np.std(values, ddof=1))
    assert (found["min"], found["max"]) == pytest.approx((min(values), max(values)))
    for q in (50, 90, 95, 99):
        if is_binned:
            true = np.quantile(values, q / 100, method="inverted_cdf")
            assert found[f"p{q}"]["value"] == pytest.approx(true, rel=0.005)
        else:
            assert found[f"p{q}"]["value"] == pytest.approx(np.percentile(values, q))


def test_every_latency_is_the_truth_from_its_mean_to_its_maximum():
    latency = summary(ALL)["latency_ms"]
    assert_distribution(latency["ttft"], [1e3 * arrivals(plan)[0] for plan in OK])
    assert_distribution(latency["e2e"], [1e3 * plan.ends for plan in OK])
    timed = [plan for plan in OK if plan.tokens > 1]
    tpot = [1e3 * (arrivals(plan)[-1] - arrivals(plan)[0]) / (plan.tokens - 1) for plan in timed]
    assert_distribution(latency["tpot"], tpot)
    gaps = [1e3 * float(gap) for plan in OK for gap in np.diff(arrivals(plan))]
    assert_distribution(latency["itl"], gaps, is_binned=True)
    assert_distribution(latency["e2e_per_token"], [1e3 * plan.ends / plan.tokens for plan in OK])
    firsts = [400.0 if plan.packets[0][1] == THOUGHT else 1e3 * arrivals(plan)[0] for plan in OK]
    assert_distribution(latency["ttfo"], firsts)
    assert latency["connect"]["max"] == 0


def test_every_rate_is_the_truth_and_says_whose_tokens_it_counts():
    found = summary(ALL)
    rates, seconds = found["throughput"], END - START
    of = {"ok": sum(plan.tokens for plan in OK), "warmup": 1.0, "error": 1, "broken": 1,
          "timeout": 1, "cut": 2}  # fmt: skip
    # Events of answers without usage count the mean tokens of an event of those with it.
    assert rates["output_tokens_of"].keys() == of.keys()
    assert rates["output_tokens_of"]["ok"] == of["ok"]
    assert rates["output_tokens_of"]["warmup"] == of["warmup"]
    assert rates["output_tokens"] == pytest.approx(sum(rates["output_tokens_of"].values()))
    assert rates["output_tokens"] == pytest.approx(sum(of.values()), rel=0.1)
    assert rates["output_tokens_per_s"] == pytest.approx(rates["output_tokens"] / seconds)
    told = 7 * 5 + 9 + 5  # by seven answers; five requests of the same size have no usage
    num_input = told * 12 / 7
    assert rates["input_tokens"] == pytest.approx(num_input)
    assert rates["input_tokens_per_s"] == pytest.approx(num_input / seconds)
    total = (num_input + rates["output_tokens"]) / seconds
    assert rates["total_tokens_per_s"] == pytest.approx(total)
    assert rates["requests_per_s"] == pytest.approx(len(OK) / seconds)
    speeds = [
        (plan.tokens - 1) / (arrivals(plan)[-1] - arrivals(plan)[0])
        for plan in OK
        if plan.tokens > 1
    ]
    assert_distribution(rates["user_tokens_per_s"], speeds)


def test_the_best_second_is_the_one_of_most_tokens_in_the_window():
    rates = summary(ALL)["throughput"]
    assert rates["peak_output_tokens_per_s"] == 8 + 2  # second 2: the burst, and two more
    early = Planned(at=0.1, packets=texts(*(0.01 * i for i in range(2, 60))), ends=0.6,
                    tokens=58, is_warmup=True)  # fmt: skip
    assert summary([early, *ALL])["throughput"]["peak_output_tokens_per_s"] == 8 + 2


def test_lengths_are_those_of_complete_answers():
    tokens = summary(ALL)["tokens"]
    assert_distribution(tokens["output"], [float(plan.tokens) for plan in OK])
    assert_distribution(tokens["input"], [7.0, 7, 9, 7, 7, 7, 5])
    assert tokens["output_from"] == {"usage": len(GOOD), "events": 1}


def test_open_requests_are_averaged_over_the_window_alone():
    found = summary(ALL)["concurrency"]
    open_s = sum(plan.ends for plan in OK + BAD) + 0.5 + (WARM.at + WARM.ends - 1.0)
    assert found["mean"] == pytest.approx(open_s / (END - START))


def test_open_requests_of_a_second_are_its_average():
    long = Planned(at=2.25, packets=texts(1.0, 5.0), ends=5.5, tokens=2)
    series = plot_data(recorded([*ALL, long], "e2e=1s"))["series"]
    spans = [(plan.at, plan.at + plan.ends) for plan in (*ALL, long)]
    for second, shown in zip(series["at"], series["open"], strict=True):
        true = sum(max(0.0, min(end, second + 1) - max(begin, second)) for begin, end in spans)
        assert shown == pytest.approx(true, abs=1e-5)


def test_every_end_is_counted_once_and_only_the_cut_one_is_not_judged():
    found = summary(ALL)
    counts = {"measured": 14, "ok": 8, "refused": 1, "error": 2, "broken": 1, "timeout": 1,
              "cut": 1, "unsent": 0, "warmup": 1, "empty": 0, "checked": 0, "valid": 0}  # fmt: skip
    assert found["requests"] == counts
    goodput = found["goodput"]
    met = [p for p in OK if arrivals(p)[0] <= 0.35 and p.ends <= 1.0]
    assert (goodput["met"], goodput["missed"], goodput["cut"]) == (len(met), 13 - len(met), 1)
    assert goodput["attainment"]["value"] == pytest.approx(len(met) / 13)
    assert goodput["attainment_if_cut_missed"] == pytest.approx(len(met) / 14)
    assert goodput["requests_per_s"] == pytest.approx(len(met) / (END - START))
    assert found["offered_per_s"] == pytest.approx(14 / (END - START))
    whats = {error["what"]: error["count"] for error in found["errors"]}
    assert whats == {"refused: full": 1, "error: HTTP 500: {}": 1, "error: oom": 1,
                     "broken: broken": 1, "timeout: timeout": 1, "cut: cut": 1}  # fmt: skip


def test_phases_of_the_server_are_told_where_it_gives_them():
    found = summary(ALL)["server_ms"]
    assert list(found) == ["decode", "queue", "admission"]  # the longest first
    assert {name: figures["mean"]["value"] for name, figures in found.items()} == pytest.approx(
        {"queue": 40, "decode": 200, "admission": 1}
    )


def test_what_is_not_known_is_no_number():
    found = summary([BAD[0]])
    assert found["latency_ms"]["ttft"] == {"count": 0}
    assert found["latency_ms"]["e2e_per_token"] == {"count": 0}
    assert found["throughput"]["user_tokens_per_s"] == {"count": 0}
    assert found["tokens"]["input"] == {"count": 0}
    assert all(math.isfinite(v) for v in found["throughput"].values() if isinstance(v, float))
