"""What keeping the ledger costs: the same decoding with it and without it, in turns.

    python benchmarks/ledger_cost.py MODEL [--streams 1 8 32] [--rounds 60] [--json FILE]

Two engines of one process run the same steps alternately, a round of some steps each, so that
whatever else the machine does falls on both. The figure is the median over the rounds of the
ratio of their times. The recorder's own time a step is measured apart, without a model.
"""

from __future__ import annotations

import argparse
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
from paceline.llm import new_request
from paceline.measure.recorder import StepRecorder

PROMPT = 64
STEPS = 16  # a round


class Decoder:
    """An engine that decodes `num_streams` sequences for ever, a round at a time."""

    def __init__(self, loaded: LoadedModel, num_streams: int) -> None:
        self._engine = loaded.engine
        params = SamplingParams(temperature=0, ignore_eos=True)
        rng = random.Random(num_streams)
        self._ids = []
        for _ in range(num_streams):
            request = new_request([rng.randrange(1000, 20_000) for _ in range(PROMPT)], params)
            self._ids.append(request.id)
            self._engine.submit(request, lambda delta: None)
        while self._engine.last_step.num_prefill_tokens or self._engine.last_step.num_seqs == 0:
            self._engine.step()

    def round(self) -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            self._engine.step()
        return time.perf_counter() - begin

    def close(self) -> None:
        for request_id in self._ids:
            self._engine.abort(request_id)
        self._engine.step()


def compare(models: dict[str, LoadedModel], num_streams: int, num_rounds: int) -> dict[str, Any]:
    """Return the median time of a step with and without the ledger, and the cost in percent."""
    decoders = {name: Decoder(loaded, num_streams) for name, loaded in models.items()}
    for decoder in decoders.values():
        decoder.round()
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for number in range(num_rounds):
        order = ("on", "off") if number % 2 else ("off", "on")
        for name in order:
            times[name].append(decoders[name].round())
    for decoder in decoders.values():
        decoder.close()
    ratios = sorted(on / off for on, off in zip(times["on"], times["off"], strict=True))
    resampled = sorted(
        statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000)
    )
    return {
        "streams": num_streams,
        "rounds": num_rounds,
        "steps_a_round": STEPS,
        "step_ms_on": statistics.median(times["on"]) / STEPS * 1e3,
        "step_ms_off": statistics.median(times["off"]) / STEPS * 1e3,
        "cost_percent": (statistics.median(ratios) - 1) * 100,
        "cost_percent_95": [(resampled[25] - 1) * 100, (resampled[974] - 1) * 100],
    }


def recorder_us(num_streams: int, num_steps: int = 3000) -> float:
    """Return the recorder's own microseconds of CPU a step of `num_streams` decoding sequences."""
    recorder = StepRecorder()
    now = time.monotonic_ns
    seqs = [
        SimpleNamespace(
            request=SimpleNamespace(id=f"request-{i}"), index=0, num_computed=PROMPT,
            num_prompt=PROMPT, num_preemptions=0, last_token_ns=1, ledger=recorder.open(0, 1),
        )
        for i in range(num_streams)
    ]  # fmt: skip
    schedule = SimpleNamespace(
        start_ns=0, is_short_of_kv=False, num_tokens=num_streams, chunks=[(s, 1) for s in seqs]
    )
    begin = time.thread_time()
    for _ in range(num_steps):
        schedule.start_ns = now()
        forward_ns = now()
        recorder.ran(
            schedule, scheduled_ns=forward_ns, built_ns=forward_ns, work_ns=forward_ns,
            forward_ns=forward_ns,
        )  # fmt: skip
        recorder.sampled(seqs, now())
        recorder.committed(now())
    return (time.thread_time() - begin) / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    models = {
        name: load_model(args.model, EngineConfig(
            ledger=name == "on", num_threads=args.threads, kv_memory_bytes=2**30,
            max_num_seqs=max(args.streams),
        ))
        for name in ("on", "off")
    }  # fmt: skip
    rows = []
    for num_streams in args.streams:
        row = compare(models, num_streams, args.rounds)
        row["recorder_us_a_step"] = recorder_us(num_streams)
        row["recorder_percent"] = row["recorder_us_a_step"] / row["step_ms_off"] / 10
        rows.append(row)
        low, high = row["cost_percent_95"]
        print(
            f"{num_streams:3} streams: step {row['step_ms_off']:.2f} ms without, "
            f"{row['step_ms_on']:.2f} with; cost {row['cost_percent']:+.2f} % "
            f"(95 %: {low:+.2f} to {high:+.2f}); recorder {row['recorder_us_a_step']:.0f} us a "
            f"step = {row['recorder_percent']:.2f} %",
            file=sys.stderr,
        )
    result = {
        "benchmark": "ledger_cost",
        "version": __version__,
        "model": models["on"].name,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "isa": models["on"].isa,
        "threads": models["on"].config.num_threads,
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
