"""What keeping the ledger costs: the same decoding with it and without it, in turns.

    python benchmarks/ledger_cost.py MODEL [--streams 1 32] [--minutes 3] [--json FILE]

Blocks of steps with and without it take turns, so that whatever else the machine does falls on
both; `ledger_cost_estimate.py` makes one figure of them. FILE keeps every step's time: a later run
with it adds to what it has. The time that the engine's thread is in the recorder is measured in
place, too, and its CPU time without a model, while its books are in the caches.
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

from ledger_cost_estimate import BLOCK, estimate

from paceline import EngineConfig, SamplingParams, __version__
from paceline.engine.build import LoadedModel, load_model
from paceline.engine.engine import Engine
from paceline.engine.recorder import NoRecorder
from paceline.llm import new_request
from paceline.measure.recorder import StepRecorder
from paceline.measure.work import StepWork

PROMPT = 64
ROUNDS_A_START = 20  # then new sequences: contexts stay short


def measure(loaded: LoadedModel, num_streams: int, seconds: float) -> list[list[list[int]]]:
    """Return rounds of four blocks: on, off, off, on, the microseconds of each step of each.

    One engine decodes `num_streams` sequences and is told before each block whether to keep a
    ledger: two engines would differ by where their memory lies, and that is more. The blocks run
    as on-off-off-on in one round and off-on-on-off in the next, so that contexts that grow and a
    machine that warms up or slows down weigh on both alike. A block ends with the books closed, in
    the time of its last step.
    """
    engine, recorders = loaded.engine, {True: loaded.recorder, False: NoRecorder()}
    ids: list[str] = []
    rounds: list[list[list[int]]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if len(rounds) % ROUNDS_A_START == 0:
            _end(loaded, ids)
            ids = _start(loaded, num_streams)
        is_first_on = len(rounds) % 2 == 0
        blocks: dict[bool, list[list[int]]] = {True: [], False: []}
        for is_on in (is_first_on, not is_first_on, not is_first_on, is_first_on):
            _record_with(engine, recorders[is_on])
            blocks[is_on].append(_block(loaded))
        rounds.append([blocks[True][0], *blocks[False], blocks[True][1]])
    _end(loaded, ids)
    return rounds


def _record_with(engine: Engine, recorder: Any) -> None:
    for part in (engine, engine._chooser, engine._requests):
        part._recorder = recorder  # type: ignore[attr-defined]


def _block(loaded: LoadedModel) -> list[int]:
    step, settle, clock = loaded.engine.step, loaded.recorder.settle, time.perf_counter
    is_on = loaded.engine._recorder is loaded.recorder
    stamps = [clock()]
    for number in range(BLOCK):
        step()
        if is_on and number == BLOCK - 1:
            settle()
        stamps.append(clock())
    return [round(1e6 * (after - before)) for before, after in itertools.pairwise(stamps)]


def _end(loaded: LoadedModel, ids: list[str]) -> None:
    for request_id in ids:
        loaded.engine.abort(request_id)
    loaded.engine.step()


def _start(loaded: LoadedModel, num_streams: int) -> list[str]:
    """Submit sequences that decode for ever, step until all do, and return their ids."""
    engine = loaded.engine
    _record_with(engine, loaded.recorder)
    rng = random.Random(num_streams)  # the same prompts at each start
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
    """A recorder, and how long its engine's thread was in each call of it."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.spent_s: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        method, clock = getattr(self._recorder, name), time.perf_counter
        spent_s = self.spent_s.setdefault(name, [])

        def timed(*args: Any, **options: Any) -> Any:
            begin = clock()
            try:
                return method(*args, **options)
            finally:
                spent_s.append(clock() - begin)

        setattr(self, name, timed)  # found without this method from now on
        return timed


def in_place_us(loaded: LoadedModel, num_streams: int, *, num_blocks: int = 60) -> dict[str, float]:
    """Return the microseconds a step that each method of the recorder takes between steps.

    Medians of what the calls took, less those of a recorder that does nothing. `settle` is that of
    a whole block, by its number of steps.
    """
    engine, recorders = loaded.engine, (_Timed(loaded.recorder), _Timed(NoRecorder()))
    ids = _start(loaded, num_streams)
    for _ in range(num_blocks):
        for recorder in recorders:
            _record_with(engine, recorder)
            for _ in range(BLOCK):
                engine.step()
        recorders[0].settle()
    _end(loaded, ids)
    on, off = (
        {name: statistics.median(spent_s) for name, spent_s in recorder.spent_s.items()}
        for recorder in recorders
    )
    times = {name: (on[name] - off[name]) * 1e6 for name in ("ran", "sampled", "committed")}
    return {**times, "settle": on["settle"] * 1e6 / BLOCK}


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


def _row(loaded: LoadedModel, num_streams: int, rounds: list[Any]) -> dict[str, Any]:
    found = estimate(rounds)
    in_place = in_place_us(loaded, num_streams)
    return {
        "streams": num_streams,
        **found,
        "in_place_us_a_step": {**in_place, "sum": sum(in_place.values())},
        "in_place_percent": sum(in_place.values()) / found["step_ms_off"] / 10,
        "recorder_us_a_step": recorder_us(num_streams, loaded.recorder.counters.work),
        "rounds_us": rounds,
    }


def _print(row: dict[str, Any]) -> None:
    low, high = row["cost_percent_95"]
    parts = ", ".join(f"{name} {us:.0f}" for name, us in row["in_place_us_a_step"].items())
    print(
        f"{row['streams']:3} streams, {row['rounds']} rounds: step {row['step_ms_off']:.2f} ms "
        f"without; cost {row['cost_percent']:+.2f} % (95 %: {low:+.2f} to {high:+.2f}); in the "
        f"recorder {row['in_place_percent']:.2f} % ({parts} us a step; "
        f"{row['recorder_us_a_step']:.0f} us alone)",
        file=sys.stderr,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--minutes", type=float, default=3.0, help="for each of them")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, help="takes the results, and adds to what it has")
    args = parser.parse_args()
    config = EngineConfig(
        ledger=True, num_threads=args.threads, kv_memory_bytes=2**30,
        max_num_seqs=max(args.streams),
    )  # fmt: skip
    loaded = load_model(args.model, config)
    found = json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else []
    rows = {row["streams"]: row for row in found}
    for num_streams in args.streams:
        rounds = rows.get(num_streams, {}).get("rounds_us", [])
        rounds += measure(loaded, num_streams, 60 * args.minutes)
        rows[num_streams] = _row(loaded, num_streams, rounds)
        _print(rows[num_streams])
    result = {
        "benchmark": "ledger_cost",
        "version": __version__,
        "model": loaded.name,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "isa": loaded.isa,
        "threads": loaded.config.num_threads,
        "rows": [rows[num_streams] for num_streams in sorted(rows)],
    }
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
