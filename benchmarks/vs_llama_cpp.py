"""Prefill and decode of one GGUF file, Paceline beside llama.cpp, interleaved in one run.

    python benchmarks/vs_llama_cpp.py model.gguf [--threads 2] [--rounds 5] [--json out.json]

llama.cpp comes from `pip install llama-cpp-python`; without it only Paceline is measured. Each
round times both engines on the same fresh random prompt: prefill of `--prompt` tokens (time to the
first token), then `--decode` tokens of one stream. Medians over the rounds; ratio is llama.cpp's
time over ours, so above 1 we are faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path


class Paceline:
    """One sequence at a time through the whole engine: scheduler, kernels, sampler."""

    name = "paceline"

    def __init__(self, path: str, threads: int, context: int) -> None:
        from paceline.config import EngineConfig
        from paceline.engine.build import load_model

        config = EngineConfig(num_threads=threads, max_model_len=context, max_num_seqs=1)
        self.loaded = load_model(path, config)
        self.vocab = self.loaded.tokenizer.vocab_size
        self.overhead: list[float] = []

    def run(self, prompt: list[int], num_decode: int) -> tuple[float, float]:
        """Return (seconds to the first token, seconds per decoded token)."""
        from paceline.types import Delta, Request, SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_decode + 1, ignore_eos=True)
        stamps: list[float] = []

        def sink(delta: Delta) -> None:
            stamps.extend(time.perf_counter() for _ in delta.token_ids)

        engine = self.loaded.engine
        start = time.perf_counter()
        engine.submit(Request(id=str(start), prompt_token_ids=tuple(prompt), params=params), sink)
        while engine.step():
            if stamps and engine.last_step.num_prefill_tokens == 0:
                s = engine.last_step
                python = s.schedule_s + s.build_s + s.commit_s
                self.overhead.append(python / (python + s.forward_s + s.sample_s))
        return stamps[0] - start, (stamps[-1] - stamps[0]) / num_decode


class LlamaCpp:
    """llama.cpp through its C API: one llama_decode a step, greedy choice from the raw logits."""

    name = "llama.cpp"

    def __init__(self, path: str, threads: int, context: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.llama = llama_cpp.Llama(
            path, n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads,
            flash_attn=True, verbose=False,
        )  # fmt: skip

    def run(self, prompt: list[int], num_decode: int) -> tuple[float, float]:
        import numpy as np

        ctx, vocab = self.llama.ctx, self.llama.n_vocab()
        self.llama._ctx.kv_cache_clear()

        def decode(tokens: list[int]) -> int:
            array = (self.api.llama_token * len(tokens))(*tokens)
            if self.api.llama_decode(ctx, self.api.llama_batch_get_one(array, len(tokens))):
                raise RuntimeError("llama_decode failed")
            logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(ctx, -1), shape=(vocab,))
            return int(logits.argmax())

        start = time.perf_counter()
        token = -1
        for i in range(0, len(prompt), 512):
            token = decode(prompt[i : i + 512])
        first = time.perf_counter()
        for _ in range(num_decode):
            token = decode([token])
        return first - start, (time.perf_counter() - first) / num_decode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    context = args.prompt + args.decode + 16
    engines: list[Paceline | LlamaCpp] = [Paceline(args.model, args.threads, context)]
    if importlib.util.find_spec("llama_cpp"):
        engines.append(LlamaCpp(args.model, args.threads, context))
    rng = random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {e.name: [] for e in engines}
    for i in range(args.rounds + 1):
        prompt = [rng.randrange(1000, 40000) for _ in range(args.prompt)]
        for engine in engines if i % 2 else reversed(engines):
            result = engine.run(prompt, args.decode)
            if i:  # the first round warms up
                times[engine.name].append(result)

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    rows = []
    for name, runs in times.items():
        prefill, decode = (statistics.median(r[i] for r in runs) for i in (0, 1))
        spread = [[min(r[i] for r in runs), max(r[i] for r in runs)] for i in (0, 1)]
        rows.append({
            "engine": name, "prefill_tok_s": args.prompt / prefill, "decode_tok_s": 1 / decode,
            "prefill_s_range": spread[0], "decode_s_range": spread[1],
        })  # fmt: skip
        print(
            f"{name:10s} prefill {args.prompt}: {args.prompt / prefill:8.1f} tok/s   "
            f"decode: {1 / decode:7.1f} tok/s"
        )
    if len(rows) == 2:
        ratio = [rows[0][k] / rows[1][k] for k in ("prefill_tok_s", "decode_tok_s")]
        print(f"ratio      prefill {ratio[0]:.2f}x   decode {ratio[1]:.2f}x")
    ours = engines[0]
    python_share = (
        statistics.median(ours.overhead) if isinstance(ours, Paceline) and ours.overhead else None
    )
    if python_share is not None:
        print(f"python and scheduling: {100 * python_share:.1f} % of a decode step (median)")
    if args.json:
        report = {
            "model": Path(args.model).name,
            "threads": args.threads,
            "rounds": args.rounds,
            "commit": commit,
            "machine": platform.processor() or platform.machine(),
            "python_share_of_decode_step": python_share,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
