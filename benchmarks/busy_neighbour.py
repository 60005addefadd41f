"""What a neighbour that keeps one core busy does to threads that share their steps.

    python benchmarks/busy_neighbour.py MODEL [--threads 2] [--rounds 7] [--json FILE]

The neighbour is a process that only spins, pinned to the last core of the affinity mask. One
engine has a single thread, which can stay out of its way, the other has several. A round times
both, with the neighbour running and with it stopped, so that whatever else the machine does falls
on all. The figure to look at is the last: with the neighbour, the time of several threads over
that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline import EngineConfig, SamplingParams, __version__
from paceline.engine.build import LoadedModel, load_model
from paceline.llm import new_request
from paceline.measure.machine import cpu_model

PROMPT = 256
_SETTLE_S = 0.05  # for the scheduler to take notice of the neighbour
_SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"

Measure = Callable[[LoadedModel], float]


@contextmanager
def neighbour(core: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that spins on `core`, and stop it until it is wanted."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN, str(core)])
    try:
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def decode_step_s(loaded: LoadedModel, *, seconds: float = 0.6) -> float:
    """Return the mean time of a step of one stream: many small ops, each waited for."""
    request_id = _submit(loaded, num_tokens=16, params=_endless())
    for _ in range(3):
        loaded.engine.step()
    num_steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        loaded.engine.step()
        num_steps += 1
    mean_s = (time.perf_counter() - begin) / num_steps
    loaded.engine.abort(request_id)
    loaded.engine.step()
    return mean_s


def prefill_s(loaded: LoadedModel, *, repeats: int = 2) -> float:
    """Return the mean time of the step that computes a prompt: few large ops."""
    begin = time.perf_counter()
    for _ in range(repeats):
        _submit(loaded, num_tokens=PROMPT, params=SamplingParams(temperature=0, max_tokens=1))
        while loaded.engine.step():
            pass
    return (time.perf_counter() - begin) / repeats


def _endless() -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True)


def _submit(loaded: LoadedModel, *, num_tokens: int, params: SamplingParams) -> str:
    prompt = [random.randrange(1000, 20_000) for _ in range(num_tokens)]
    request = new_request(prompt, params)
    loaded.engine.submit(request, lambda delta: None)
    return request.id


def compare(
    engines: dict[str, LoadedModel], measure: Measure, spinner: subprocess.Popen[bytes], rounds: int
) -> dict[str, Any]:
    """Return the median ms of each engine, alone and beside the neighbour, and their ratios."""
    times: dict[tuple[str, str], list[float]] = {
        (state, name): [] for state in ("alone", "beside") for name in engines
    }
    for number in range(rounds):
        for state in ("alone", "beside") if number % 2 else ("beside", "alone"):
            spinner.send_signal(signal.SIGCONT if state == "beside" else signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            for name in list(engines)[:: 1 if number // 2 % 2 else -1]:
                times[state, name].append(measure(engines[name]) * 1e3)
    spinner.send_signal(signal.SIGSTOP)
    one, several = engines
    return {
        **{
            f"{state}_{name}_ms": {
                "median": statistics.median(values), "least": min(values), "greatest": max(values)
            }
            for (state, name), values in times.items()
        },
        "speedup_alone": _ratio(times["alone", one], times["alone", several]),
        "several_over_one_beside": _ratio(times["beside", several], times["beside", one]),
    }  # fmt: skip


def _ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Return the median, least and greatest ratio of values of the same round."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}


def _told(row: dict[str, Any], num_threads: int) -> str:
    ms = {key: f"{row[key]['median']:.1f} ms" for key in row if key.endswith("_ms")}
    beside = row["several_over_one_beside"]
    return (
        f"alone: {ms['alone_one_ms']} with one thread, {ms['alone_several_ms']} with {num_threads} "
        f"({row['speedup_alone']['median']:.2f}x faster); beside the neighbour: "
        f"{ms['beside_one_ms']} and {ms['beside_several_ms']}, {beside['median']:.2f} of one "
        f"thread's time ({beside['least']:.2f} to {beside['greatest']:.2f})"
    )


def _load(model: str, num_threads: int) -> LoadedModel:
    return load_model(
        model,
        EngineConfig(num_threads=num_threads, kv_memory_bytes=2**28, prefix_cache=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    engines = {"one": _load(args.model, 1), "several": _load(args.model, args.threads)}
    rows = {}
    with neighbour(core) as spinner:
        for name, measure in (("decode", decode_step_s), ("prefill", prefill_s)):
            row = rows[name] = compare(engines, measure, spinner, args.rounds)
            print(f"{name:8} {_told(row, args.threads)}", file=sys.stderr)
    result = {
        "benchmark": "busy_neighbour",
        "version": __version__,
        "model": engines["one"].name,
        "machine": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "isa": engines["one"].isa,
        "threads": args.threads,
        "rounds": args.rounds,
        "prompt": PROMPT,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
