"""How true `paceline bench` is: its figures beside those of a server that knows its own writes.

Three checks against scripted servers in processes of their own:
- truth: 200 answers with random TTFTs and gaps; every figure against the times at which the server
  wrote (both read one clock). A write happens between its beginning and its end, so a figure is
  right within what these allow (`bench_truth.py`). What the server took to read a request is told
  apart;
- streams: 500 streams at once, 20 tokens/s each; the client's CPU share and its lag;
- memory: a million tokens; the growth of the client's resident memory.

    python benchmarks/bench_client.py [--json FILE] [--log FILE] [truth streams memory]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_truth import RunTruth, TrueRequest, Truth, arrivals_of

from paceline.bench.arrivals import Arrivals, Closed, Gamma
from paceline.bench.course import Limits
from paceline.bench.objective import parse_objectives
from paceline.bench.program import Program, run_program
from paceline.bench.stage import Plan
from paceline.bench.workloads import build_workload
from tests.fake_server import (
    DONE,
    FINISH,
    ROLE,
    FakeServer,
    Script,
    delta,
    steady,
    usage,
)


def random_script(number: int) -> Script:
    rng = random.Random(number)
    at = rng.uniform(20, 400)
    steps = [(0.0, ROLE)]
    count = rng.randint(2, 30)
    for _ in range(count):
        steps.append((at, delta(content="x")))
        at += rng.choice((5, 20, 20, 20, 80, 300))
    steps.append((at, FINISH + usage(9, count) + DONE))
    return Script(tuple(steps), texts=tuple(range(1, count + 1)))


def fast_script(number: int) -> Script:
    return steady(ttft_ms=20, gap_ms=1.0, tokens=1000)


def slow_script(number: int) -> Script:
    return steady(ttft_ms=100 + number % 50, gap_ms=50, tokens=200)


def serve(script: Callable[[int], Script], pipe: Connection) -> None:
    is_exact = script is random_script
    with FakeServer(lambda number, body: script(number), is_exact=is_exact) as server:
        pipe.send(server.url)
        pipe.recv()
        seen = [
            (s.body["messages"][0]["content"], s.came_at, s.begun_at, s.written_at, s.ended_at)
            for s in server.served
        ]
        pipe.send(seen if is_exact else [])


def run(
    script: Callable[[int], Script], load: Arrivals | Closed, limits: Limits, log: Path
) -> tuple[dict[str, Any], list[Any], float]:
    """Return the stage's summary, what the server saw, and the clock's time at `scheduled_s` 0."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(script, theirs), daemon=True)
    process.start()
    plan = Plan(
        workload=build_workload("synthetic:input=8,output=8"),
        objectives=parse_objectives(()),
        limits=limits,
    )
    program = Program(urls=[("fake", ours.recv())], plan=plan, loads=[({}, load)], model="fake")
    epochs: list[float] = []
    result = run_program(
        program, log=log, on_progress=lambda load, labels: epochs.append(load.recorder.epoch)
    )
    ours.send("stop")
    served = ours.recv()
    process.join()
    return result.document["stages"][0], served, epochs[-1]


def check_truth(log: Path) -> dict[str, Any]:
    """Return the errors (ms) of TTFT, gaps and TPOT, how exactly the server knows the truth, and
    which of the run's figures, means to maxima of TTFT, TPOT and E2E, are not true."""
    stage, served, epoch = run(random_script, Gamma(10.0), Limits(num_requests=200), log)
    lines = [json.loads(line) for line in log.read_text().splitlines()][:-1]
    served.sort(key=lambda item: item[1])
    workload = build_workload("synthetic:input=8,output=8")
    texts = {workload.conversation("0/[] round 0", i).turns[0].messages[0]["content"]: i
             for i in range(200)}  # fmt: skip
    by_id = {line["id"]: line for line in lines}
    truth, requests = Truth(), []
    for number, (text, came_at, begun_at, written_at, ended_at) in enumerate(served):
        line = by_id[texts[text]]
        spans = [(begun_at[i], written_at[i]) for i in random_script(number).texts]
        truth.add(line, spans, came_at=came_at, epoch=epoch)
        requests.append(TrueRequest(
            line=line, texts=truth.writes_of(arrivals_of(line, epoch=epoch), spans),
            end=(written_at[-1], ended_at), output_tokens=len(spans),
        ))  # fmt: skip
    true_gaps = [
        1e3 * (b - a) for *_, moments, _ in served for a, b in itertools.pairwise(moments[1:-1])
    ]
    num_tokens = sum(request.output_tokens for request in requests)
    return {
        **truth.report(),
        "figures_wrong_by_more_than_1_ms_and_1_percent": RunTruth(requests, epoch=epoch).wrong(
            stage["latency_ms"]
        ),
        "output_tokens": {"reported": stage["throughput"]["output_tokens"], "true": num_tokens},
        "itl_mean": {
            "reported": stage["latency_ms"]["itl"]["mean"]["value"],
            "true": statistics.mean(true_gaps),
        },
    }


def check_streams(log: Path, num_streams: int = 500) -> dict[str, Any]:
    limits = Limits(duration_s=20.0, warmup_s=3.0)
    stage, _, _ = run(slow_script, Closed(num_streams), limits, log)
    return {
        "streams": num_streams,
        "output_tokens_per_s": stage["throughput"]["output_tokens_per_s"],
        "expected_tokens_per_s": num_streams * 20,
        "itl_p50_ms": stage["latency_ms"]["itl"].get("p50", {}).get("value"),
        "client": {name: stage["client"][name] for name in ("cpu_share", "is_bottleneck")},
        "loop_lag_p99_ms": stage["client"]["loop_lag_ms"]["p99"]["value"],
    }


def check_memory(log: Path) -> dict[str, Any]:
    """Return the peak of resident memory after a tenth of the tokens and after all."""
    peaks = []
    for num_requests in (100, 1000):
        stage, _, _ = run(fast_script, Closed(20), Limits(num_requests=num_requests), log)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {
        "tokens": stage["throughput"]["output_tokens"],
        "peak_mb_at_a_tenth": peaks[0],
        "peak_mb_at_the_end": peaks[1],
        "output_tokens_per_s": stage["throughput"]["output_tokens_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="keep the lines of the last check's requests")
    parser.add_argument("checks", nargs="*", default=["truth", "streams", "memory"])
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    report: dict[str, Any] = {"commit": commit, "machine": platform.processor() or "?",
                              "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    checks = {"truth": check_truth, "streams": check_streams, "memory": check_memory}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.checks:
            report[name] = checks[name](arguments.log or Path(folder) / "requests.jsonl")
            print(json.dumps({name: report[name]}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
