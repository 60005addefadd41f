"""What keeping the ledger costs: the same decoding with it and without it, in turns.

    python benchmarks/ledger_cost.py MODEL [--streams 1 8 32] [--pairs 500] [--json FILE]

Blocks of steps with and without it take turns, so that whatever else the machine does falls on
both. The time that the engine's thread is in the recorder is measured in place, too, and its CPU
time without a model, while its books are in the caches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline import EngineConfig, SamplingParams, __version__
from paceline.engine.build import LoadedModel, load_model
from paceline.engine.recorder import NoRecorder
from paceline.llm import new_request
from paceline.measure.recorder import StepRecorder
from paceline.measure.work import StepWork

PROMPT = 64
PAIRS_A_START = 60  # then new sequences: contexts stay short
BLOCK = 10  # steps: what the recorder notes in a block it books in it, too


def compare(loaded: LoadedModel, num_streams: int, num_pairs: int) -> dict[str, Any]:
    """Return the median time of a step with and without the ledger, and the cost in percent.

    One engine decodes `num_streams` sequences and is told in every other block to keep no ledger:
    two engines would differ by where their memory lies, and that is more. The cost is the
    median difference of two neighbouring blocks.
    """
    engine = loaded.engine
    recorders = {"on": loaded.recorder, "off": NoRecorder()}
    ids: list[str] = []
    times: dict[str, list[float]] = {name: [] for name in recorders}
    for number in range(num_pairs):
        if number % PAIRS_A_START == 0:
            _end(loaded, ids)
            ids = _start(loaded, num_streams)
        for name in ("on", "off") if number % 2 else ("off", "on"):
            engine._recorder = recorders[name]
            begin = time.perf_counter()
            for _ in range(BLOCK):
                engine.step()
            if name == "on":
                loaded.recorder.settle()
            times[name].append((time.perf_counter() - begin) / BLOCK)
    _end(loaded, ids)
    off_s = statistics.median(times["off"])
    costs = [(on - off) / off_s * 100 for on, off in zip(times["on"], times["off"], strict=True)]
    medians = sorted(statistics.median(random.choices(costs, k=num_pairs)) for _ in range(1000))
    return {
        "streams": num_streams,
        "pairs": num_pairs,
        "step_ms_on": statistics.median(times["on"]) * 1e3,
        "step_ms_off": off_s * 1e3,
        "cost_percent": statistics.median(costs),
        "cost_percent_95": [medians[25], medians[974]],
    }


def _end(loaded: LoadedModel, ids: list[str]) -> None:
    for request_id in ids:
        loaded.engine.abort(request_id)
    loaded.engine.step()


def _start(loaded: LoadedModel, num_streams: int) -> list[str]:
    """Submit sequences that decode for ever, step until all do, and return their ids."""
    engine = loaded.engine
    engine._recorder = loaded.recorder
    rng = random.Random(num_streams)
    params = SamplingParams(temperature=0, ignore_eos=True)
    ids = []
    for _ in range(num_streams):
        request = new_request([rng.randrange(1000, 20_000) for _ in range(PROMPT)], params)
        ids.append(request.id)
        engine.submit(request, lambda delta: None)
    while engine.last_step.num_prefill_tokens or engine.last_step.num_seqs != num_streams:
        engine.step()
    return ids


class _Timed:
    """A recorder, and how long its engine's thread was in it."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        method, clock = getattr(self._recorder, name), time.perf_counter

        def timed(*args: Any, **options: Any) -> Any:
            begin = clock()
            try:
                return method(*args, **options)
            finally:
                self.spent_s += clock() - begin

        setattr(self, name, timed)  # found without this method from now on
        return timed


def in_place_us(loaded: LoadedModel, num_streams: int, *, num_blocks: int = 60) -> float:
    """Return the microseconds a step that the recorder takes between the model's steps."""
    engine, recorders = loaded.engine, (_Timed(loaded.recorder), _Timed(NoRecorder()))
    ids = _start(loaded, num_streams)
    for _ in range(num_blocks):
        for recorder in recorders:
            engine._recorder = recorder
            for _ in range(BLOCK):
                engine.step()
        recorders[0].settle()
    _end(loaded, ids)
    on, off = (recorder.spent_s for recorder in recorders)
    return (on - off) / num_blocks / BLOCK * 1e6


class _Decoding(SimpleNamespace):
    """What the recorder asks of a sequence; like one it is equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def recorder_us(num_streams: int, work: StepWork | None = None, *, num_steps: int = 3000) -> float:
    """Return the recorder's own microseconds of CPU a step of `num_streams` decoding sequences."""
    recorder = StepRecorder(work)
    now = time.monotonic_ns
    seqs = [
        _Decoding(
            request=SimpleNamespace(
                id=f"request-{i}", prompt_token_ids=(i,) * PROMPT, cache_salt=""
            ),
            index=0, num_computed=PROMPT, num_prompt=PROMPT, num_preemptions=0, last_token_ns=1,
            ledger=recorder.open(0, 1), chain=None, draft=None, token_ids=[i] * (PROMPT + 1),
        )
        for i in range(num_streams)
    ]  # fmt: skip
    schedule = SimpleNamespace(
        start_ns=0,
        turn_ns=0,
        is_short_of_kv=False,
        num_tokens=num_streams,
        chunks=[],
        draft_ns=0,
        num_drafted=0,
    )
    begin = time.thread_time()
    for _ in range(num_steps):
        schedule.start_ns = now()
        schedule.chunks = [(s, 1) for s in seqs]
        forward_ns = now()
        recorder.ran(
            schedule, scheduled_ns=forward_ns, built_ns=forward_ns, work_ns=forward_ns,
            forward_ns=forward_ns,
        )  # fmt: skip
        recorder.sampled(seqs, now())
        recorder.committed(now())
    recorder.settle()
    return (time.thread_time() - begin) / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, nargs="+", default=[500], help="for each of them")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        ledger=True, num_threads=args.threads, kv_memory_bytes=2**30,
        max_num_seqs=max(args.streams),
    )  # fmt: skip
    loaded = load_model(args.model, config)
    rows = []
    for num_streams, num_pairs in zip(args.streams, itertools.cycle(args.pairs), strict=False):
        row = compare(loaded, num_streams, num_pairs)
        row["in_place_us_a_step"] = in_place_us(loaded, num_streams)
        row["in_place_percent"] = row["in_place_us_a_step"] / row["step_ms_off"] / 10
        row["recorder_us_a_step"] = recorder_us(num_streams, loaded.recorder.counters.work)
        rows.append(row)
        low, high = row["cost_percent_95"]
        print(
            f"{num_streams:3} streams: step {row['step_ms_off']:.2f} ms without, "
            f"{row['step_ms_on']:.2f} with; cost {row['cost_percent']:+.2f} % "
            f"(95 %: {low:+.2f} to {high:+.2f}); in the recorder "
            f"{row['in_place_us_a_step']:.0f} us a step = {row['in_place_percent']:.2f} % "
            f"({row['recorder_us_a_step']:.0f} us alone)",
            file=sys.stderr,
        )
    result = {
        "benchmark": "ledger_cost",
        "version": __version__,
        "model": loaded.name,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "isa": loaded.isa,
        "threads": loaded.config.num_threads,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
