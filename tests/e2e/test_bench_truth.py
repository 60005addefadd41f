"""Every figure of a run beside what the server knows of its own writes, for each way to answer."""

import json
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline.bench.arrivals import build_arrivals
from paceline.bench.load import Limits
from paceline.bench.objective import parse_objectives
from paceline.bench.program import Program, run_program
from paceline.bench.stage import Plan
from paceline.bench.workloads import build_workload
from tests.fake_server import (
    DONE,
    EMPTY,
    FINISH,
    ROLE,
    FakeServer,
    Script,
    delta,
    event,
    steady,
    usage,
)

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

from bench_truth import RunTruth, TrueRequest, Truth, arrivals_of  # noqa: E402

sys.path.remove(str(FOLDER))

TEXT = delta(content="x")
JSON = ("Content-Type", "application/json")
PHASES = usage(7, 3).replace(b'"completion_tokens": 3', b'"completion_tokens": 3, "paceline": '
                             b'{"parts_ms": {"queue": 40, "decode": 20}}')  # fmt: skip


def whole(*steps: tuple[float, bytes], texts: tuple[int, ...]) -> Script:
    return Script(steps, texts=texts)


# Behaviour -> its script, how it ends, output tokens.
GOOD = {
    "fast": (steady(ttft_ms=20, gap_ms=10, tokens=8), 8),
    "slow": (steady(ttft_ms=700, gap_ms=60, tokens=5), 5),
    "burst": (whole((0, ROLE), (100, TEXT * 4), (200, TEXT * 4), (200, FINISH + usage(7, 8) + DONE),
                    texts=(1, 2)), 8),
    "empty": (whole((0, EMPTY), (50, EMPTY), (90, TEXT), (130, EMPTY), (150, TEXT),
                    (150, FINISH + usage(7, 2) + DONE), texts=(2, 4)), 2),
    "stall": (whole((0, ROLE), (30, TEXT), (50, TEXT), (650, TEXT),
                    (650, FINISH + usage(7, 3) + DONE), texts=(1, 2, 3)), 3),
    "role first": (whole((0, ROLE), (300, TEXT), (340, TEXT), (380, TEXT),
                         (380, FINISH + PHASES + DONE), texts=(1, 2, 3)), 3),
    "no usage": (whole((0, ROLE), (60, TEXT), (90, TEXT), (120, FINISH + DONE), texts=(1, 2)), 2),
}  # fmt: skip
BAD = {
    "refused": Script(((0, b'{"error":{"message":"full"}}'),), status=429,
                      headers=(JSON, ("Retry-After", "1"))),
    "error": Script(((0, ROLE), (20, TEXT), (40, event(error={"message": "oom"}) + DONE))),
    "broken": Script(((0, ROLE), (20, TEXT)), end="reset"),
    "timeout": Script(((0, ROLE), (20, TEXT)), end="hang"),
}  # fmt: skip
ORDER = [*GOOD, *BAD] * 4
LIMITS_MS = {"ttft": 400.0, "e2e": 1000.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the stage, its lines by id, the server's view of each, and the clock at 0 s."""
    log = tmp_path_factory.mktemp("truth") / "log.jsonl"
    workload = build_workload("synthetic:input=8,output=8")
    plan = Plan(
        workload=workload, objectives=parse_objectives(["ttft=400ms,e2e=1s"]),
        limits=Limits(num_requests=len(ORDER), timeout_s=3.0),
    )  # fmt: skip
    texts = [workload.conversation("0/[] round 0", i).turns[0].messages[0]["content"]
             for i in range(len(ORDER))]  # fmt: skip
    scripts = {name: script for name, (script, _) in GOOD.items()} | BAD
    epochs = []

    def choose(number, body):
        return scripts[ORDER[texts.index(body["messages"][0]["content"])]]

    with FakeServer(choose) as server:
        program = Program(urls=[("fake", server.url)], plan=plan, model="fake",
                          loads=[({}, build_arrivals("constant", 10.0))])  # fmt: skip
        before = signal.getsignal(signal.SIGINT)
        document = run_program(
            program, log=log, on_progress=lambda load, labels: epochs.append(load.recorder.epoch)
        ).document
        assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C does nothing any more"
        served = {texts.index(s.body["messages"][0]["content"]): s for s in server.served}
    lines = {line["id"]: line for line in map(json.loads, log.read_text().splitlines()[:-1])}
    return document["stages"][0], lines, served, epochs[-1]


def truth(run) -> RunTruth:
    _, lines, served, epoch = run
    requests = []
    for idx, name in enumerate(ORDER):
        if name in GOOD:
            script, tokens = GOOD[name]
            seen = served[idx]
            spans = [(seen.begun_at[i], seen.written_at[i]) for i in script.texts]
            arrivals = arrivals_of(lines[idx], epoch=epoch)
            requests.append(TrueRequest(
                line=lines[idx], output_tokens=tokens, texts=Truth().writes_of(arrivals, spans),
                end=(seen.written_at[-1], seen.ended_at),
            ))  # fmt: skip
    return RunTruth(requests, epoch=epoch)


def test_every_latency_from_its_minimum_to_its_maximum_is_the_truth(run):
    assert truth(run).wrong(run[0]["latency_ms"]) == {}


def test_every_end_is_counted_and_the_share_within_the_objective_is_the_truth(run):
    stage, lines, *_ = run
    expected = ["ok" if name in GOOD else name for name in ORDER]
    assert [lines[i]["outcome"] for i in range(len(ORDER))] == expected
    for outcome, count in Counter(expected).items():
        assert stage["requests"][outcome] == count
    assert stage["requests"]["measured"] == len(ORDER)
    least, most = truth(run).num_met(LIMITS_MS)
    goodput = stage["goodput"]
    assert least <= goodput["met"] <= most
    assert goodput["met"] + goodput["missed"] == len(ORDER)
    assert goodput["attainment"]["value"] == pytest.approx(goodput["met"] / len(ORDER))


def test_every_rate_is_the_truth(run):
    stage, *_ = run
    rates, seconds = stage["throughput"], stage["window_s"]
    tokens = 4 * sum(tokens for _, tokens in GOOD.values())
    assert rates["output_tokens_of"]["ok"] == pytest.approx(tokens)
    # All prompts are alike, and read where a text came: a refused one is not.
    read = 4 * (len(GOOD) + len(BAD) - 1) * 7
    assert rates["input_tokens"] == pytest.approx(read, rel=0.01)
    assert rates["output_tokens_per_s"] == pytest.approx(rates["output_tokens"] / seconds)
    assert rates["input_tokens_per_s"] == pytest.approx(rates["input_tokens"] / seconds)
    total = (rates["input_tokens"] + rates["output_tokens"]) / seconds
    assert rates["total_tokens_per_s"] == pytest.approx(total)
    assert rates["requests_per_s"] == pytest.approx(4 * len(GOOD) / seconds)
    # From the first that is due to the end of the last, which hangs for the 3 s that it may.
    assert seconds >= (len(ORDER) - 1) / 10 + 3.0
    assert stage["tokens"]["output_from"] == {"usage": 4 * (len(GOOD) - 1), "events": 4}


def test_phases_are_those_that_the_server_told(run):
    phases = {name: (figures["count"], figures["max"]) for name, figures in
              run[0]["server_ms"].items()}  # fmt: skip
    assert phases == {"queue": (4, pytest.approx(40)), "decode": (4, pytest.approx(20))}
