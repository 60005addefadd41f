"""What continuous batching, chunked prefill and the KV format buy and cost, on one model.

    python benchmarks/levers.py MODEL [--threads 2] [--rounds 3] [--json FILE]

1. batching: aggregate decode speed of 1 to 32 streams.
2. chunked prefill: four streams decode when a long prompt arrives; the longest gap between two
   tokens of a stream, and the time to first token of the long prompt, by token budget and policy.
3. KV format: decode speed at a long context, and KV bytes a token, for f16, bf16 and f32.

Figures are medians over the rounds; the settings of a part take turns within a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.build import LoadedModel, load_model
from paceline.engine.memory import kv_token_bytes
from paceline.types import Delta, Request, SamplingParams

RNG = random.Random(0)
LONG_PROMPT = 2000


@dataclass
class Stream:
    """A greedy request and the times of its tokens so far."""

    id: str
    times: list[float]


def submit(loaded: LoadedModel, num_prompt: int, num_tokens: int) -> Stream:
    stream = Stream(str(RNG.random()), [])

    def sink(delta: Delta) -> None:
        stream.times.extend(time.perf_counter() for _ in delta.token_ids)

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    token_ids = tuple(RNG.randrange(1000, 40000) for _ in range(num_prompt))
    loaded.engine.submit(Request(id=stream.id, prompt_token_ids=token_ids, params=params), sink)
    return stream


def run_all(loaded: LoadedModel) -> None:
    while loaded.engine.step():
        pass


def batch_speed(loaded: LoadedModel, num_streams: int, num_tokens: int = 33) -> float:
    """Tokens per second of all streams together, from the moment that all of them decode."""
    streams = [submit(loaded, 32, num_tokens) for _ in range(num_streams)]
    run_all(loaded)
    start, end = max(s.times[0] for s in streams), max(s.times[-1] for s in streams)
    return sum(t > start for s in streams for t in s.times) / (end - start)


def long_prompt_beside_streams(loaded: LoadedModel) -> tuple[float, float]:
    """Return (longest gap of four decoding streams, TTFT of the long prompt), in seconds."""
    engine = loaded.engine
    streams = [submit(loaded, 32, 400) for _ in range(4)]
    while min(len(s.times) for s in streams) < 16:
        engine.step()
    arrival = time.perf_counter()
    late = submit(loaded, LONG_PROMPT, 8)
    while not late.times:
        engine.step()
    ttft = late.times[0] - arrival
    gaps = [b - a for s in streams for a, b in itertools.pairwise(s.times) if b > arrival]
    for stream in (*streams, late):
        engine.abort(stream.id)
    run_all(loaded)
    return max(gaps), ttft


def long_context_speed(loaded: LoadedModel) -> float:
    stream = submit(loaded, LONG_PROMPT, 33)
    run_all(loaded)
    return 32 / (stream.times[-1] - stream.times[0])


def interleaved(settings: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[object]]:
    """Run each setting once to warm up, then all of them in turn, `rounds` times."""
    results: dict[str, list[object]] = defaultdict(list)
    for i in range(rounds + 1):
        for name, measure in settings.items():
            value = measure()
            if i:
                results[name].append(value)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def load(**options: object) -> LoadedModel:
        config = EngineConfig(num_threads=args.threads, max_model_len=2560, **options)  # type: ignore[arg-type]
        return load_model(args.model, config)

    base = load()
    speeds = interleaved(
        {str(n): lambda n=n: batch_speed(base, n) for n in (1, 2, 4, 8, 16, 32)}, args.rounds
    )
    batching = {n: statistics.median(v) for n, v in speeds.items()}
    for n, speed in batching.items():
        print(
            f"batching: {n:>2} streams {speed:7.1f} tok/s  {speed / batching['1']:.2f}x", flush=True
        )

    variants = {
        "fcfs, budget 2048": load(max_batched_tokens=2048),
        "fcfs, budget 512": base,
        "fcfs, budget 128": load(max_batched_tokens=128),
        "fcfs, budget 32": load(max_batched_tokens=32),
        "slo:step_ms=50": load(policy="slo:step_ms=50"),
    }
    pairs = interleaved(
        {k: lambda m=m: long_prompt_beside_streams(m) for k, m in variants.items()}, args.rounds
    )
    chunked = {}
    for name, values in pairs.items():
        gap, ttft = (statistics.median(v[i] for v in values) for i in (0, 1))
        chunked[name] = {"longest_gap_s": gap, "ttft_s": ttft}
        print(
            f"chunked prefill: {name:18} longest gap {gap * 1e3:6.0f} ms  TTFT {ttft:.2f} s",
            flush=True,
        )

    models = {"f16": base, "bf16": load(kv_dtype="bf16"), "f32": load(kv_dtype="f32")}
    rates = interleaved(
        {k: lambda m=m: long_context_speed(m) for k, m in models.items()}, args.rounds
    )
    kv = {}
    for name, values in rates.items():
        size = kv_token_bytes(base.checkpoint.config, name)
        kv[name] = {"tok_s": statistics.median(values), "bytes_per_token": size}
        print(
            f"kv format: {name:4} {kv[name]['tok_s']:6.1f} tok/s, {size} B a token",
            flush=True,
        )

    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        report = {
            "model": base.name, "isa": base.isa, "threads": args.threads, "rounds": args.rounds,
            "commit": commit, "machine": platform.machine(), "long_prompt": LONG_PROMPT,
            "batching_tok_s": batching, "chunked_prefill": chunked, "kv_format": kv,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
