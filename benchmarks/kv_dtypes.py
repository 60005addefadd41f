"""What each format of the KV cache buys, and its price: decode speed at a long context, and KL.

    python benchmarks/kv_dtypes.py MODEL [--threads 2] [--context 4000] [--rounds 7]
        [--dtypes f16 bf16 f32 int8 fp8 k8v4 int4] [--against bf16] [--characters 100000]
        [--activations f32] [--json FILE]

Speed: every format has an engine, which computes the prompt once and keeps it. A round decodes
after it in each format in turn, so that whatever else the machine does falls on all; ratios are
taken within a round, and the medians of both are printed. The share is that of the floor: the time
that the machine's read bandwidth and multiplies allow for the step's bytes, over the time measured.

Quality: mean and largest KL divergence (nats) and equal best tokens against an f32 cache, over the
prose of tests/data in windows of 1,024 tokens of which the second half counts. Activations are f32
(`--activations q8`: as a server has them): 8-bit ones turn the least difference, also that of f16,
into a KL of some thousandths. `--rounds 0` or `--characters 0` leaves a part out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from paceline import EngineConfig, SamplingParams, __version__
from paceline.backends.native import NativeBackend
from paceline.catalog import resolve
from paceline.config import ACTIVATIONS, KV_DTYPES
from paceline.engine.build import LoadedModel, load_model
from paceline.engine.memory import kv_token_bytes
from paceline.measure.ceilings import Ceilings, find_ceilings
from paceline.measure.floors import decode_work, floor_s, model_costs
from paceline.measure.machine import cpu_model
from paceline.measure.quality import Fidelity, compare_logits, limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.text.tokenizer import build_tokenizer
from paceline.types import Delta, Request
from paceline.weights.checkpoint import Checkpoint, open_checkpoint

PROSE = Path(__file__).parents[1] / "tests" / "data" / "northanger_abbey.txt"
NUM_TOKENS = 65  # of a round's answer: 64 steps are timed
WINDOW = 1024
FIRST = WINDOW // 2  # the first row that counts


def decode_step_s(loaded: LoadedModel, prompt: tuple[int, ...], name: str) -> float:
    """Return the mean time of a step of one stream behind `prompt`."""
    times: list[float] = []  # of its tokens

    def sink(delta: Delta) -> None:
        times.extend(time.perf_counter() for _ in delta.token_ids)

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    loaded.engine.submit(Request(id=name, prompt_token_ids=prompt, params=params), sink)
    while loaded.engine.step():
        pass
    return (times[-1] - times[0]) / (len(times) - 1)


def measure_speed(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the medians of each format, with the ratios to `args.against` of the same round."""
    max_len = args.context + NUM_TOKENS + 15
    engines: dict[str, LoadedModel] = {}
    for dtype in args.dtypes:
        config = EngineConfig(
            num_threads=args.threads, max_model_len=max_len, max_num_seqs=2, kv_dtype=dtype
        )
        engines[dtype] = load_model(args.model, config)
    rng = random.Random(0)
    prompt = tuple(rng.randrange(1000, 40000) for _ in range(args.context))
    seconds: dict[str, list[float]] = {dtype: [] for dtype in engines}
    for number in range(args.rounds + 1):  # the first computes the prompt
        for dtype in list(engines)[:: 1 if number % 2 else -1]:
            spent = decode_step_s(engines[dtype], prompt, f"{dtype} {number}")
            if number:
                seconds[dtype].append(spent)
    ceilings = find_ceilings(args.threads).at(args.threads)
    assert ceilings is not None
    checkpoint = next(iter(engines.values())).checkpoint
    return {dtype: _speed(checkpoint, ceilings, args, seconds, dtype) for dtype in engines}


def _speed(
    checkpoint: Checkpoint,
    ceilings: Ceilings,
    args: argparse.Namespace,
    seconds: dict[str, list[float]],
    dtype: str,
) -> dict[str, Any]:
    work = decode_work(model_costs(checkpoint, dtype), num_streams=1, context=args.context)
    median = statistics.median(seconds[dtype])
    pairs = zip(seconds[args.against], seconds[dtype], strict=True)
    ratios = [other / own for other, own in pairs]
    return {
        "bytes_per_token": kv_token_bytes(checkpoint.config, dtype),
        "step_bytes": work.num_bytes,
        "decode_tok_s": 1 / median,
        "share_of_floor": floor_s(work, ceilings) / median,
        f"over_{args.against}": {
            "median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)
        },
        "step_ms": [value * 1e3 for value in seconds[dtype]],
    }  # fmt: skip


def measure_quality(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what each format's logits are, beside those over an f32 cache."""
    checkpoint = open_checkpoint(resolve(args.model))
    text = PROSE.read_text()[: args.characters]
    token_ids = build_tokenizer(checkpoint.tokenizer).encode(text)
    windows = [
        token_ids[start : start + WINDOW]
        for start in range(0, len(token_ids) - WINDOW + 1, WINDOW)
    ]  # fmt: skip
    kv, limits = limits_for(WINDOW, block_size=16)
    plan = build_plan(checkpoint.config)
    backends: dict[str, NativeBackend] = {}
    for dtype in dict.fromkeys(["f32", *args.dtypes]):
        backends[dtype] = NativeBackend(args.threads, activations=args.activations)
        spec = replace(kv, dtype=dtype)
        backends[dtype].load(plan, checkpoint.tensors, kv=spec, limits=limits)
    pieces: dict[str, list[Fidelity]] = {dtype: [] for dtype in backends}
    for window in windows:
        logits = [
            sequence_logits(backend, window, kv=kv, limits=limits, first=FIRST)
            for backend in backends.values()
        ]
        for step in zip(*logits, strict=True):  # all steps have as many rows
            for dtype, rows in zip(backends, step, strict=True):
                pieces[dtype].append(compare_logits(step[0], rows))
    return {
        dtype: {
            "kl_mean": statistics.mean(piece.kl_mean for piece in pieces[dtype]),
            "kl_max": max(piece.kl_max for piece in pieces[dtype]),
            "top1_agreement": statistics.mean(piece.top1_agreement for piece in pieces[dtype]),
            "num_rows": sum(piece.num_rows for piece in pieces[dtype]),
        }
        for dtype in args.dtypes
    }


def report(speed: dict[str, Any], quality: dict[str, Any], against: str) -> None:
    """Say it in lines, on stderr."""
    for dtype, row in speed.items():
        ratio = row[f"over_{against}"]
        print(
            f"{dtype:5} {row['decode_tok_s']:7.1f} tok/s, {ratio['median']:.2f}x of {against} "
            f"({ratio['least']:.2f} to {ratio['greatest']:.2f}), "
            f"{100 * row['share_of_floor']:.0f} % of the floor, "
            f"{row['bytes_per_token']} B a token",
            file=sys.stderr,
        )
    for dtype, row in quality.items():
        print(
            f"{dtype:5} KL {row['kl_mean']:.5f} (largest {row['kl_max']:.3f}), "
            f"top-1 {100 * row['top1_agreement']:.2f} %, {row['num_rows']} tokens",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=list(KV_DTYPES), choices=KV_DTYPES)
    parser.add_argument("--against", default="bf16", choices=KV_DTYPES)
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--activations", default="f32", choices=ACTIVATIONS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds and args.against not in args.dtypes:
        parser.error(f"--against {args.against} is none of --dtypes")
    speed = measure_speed(args) if args.rounds else {}
    quality = measure_quality(args) if args.characters else {}
    report(speed, quality, args.against)
    if args.json:
        result = {
            "benchmark": "kv_dtypes",
            "version": __version__,
            "model": Path(args.model).name,
            "machine": cpu_model(),
            "threads": args.threads,
            "rounds": args.rounds,
            "context": args.context,
            "characters": args.characters,
            "activations": args.activations,
            "speed": speed,
            "quality": quality,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
