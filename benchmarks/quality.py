"""The price of our arithmetic: native against the float32 reference on 100 kB of prose.

    python benchmarks/quality.py MODEL... [--characters 100000] [--kv-dtype f16] [--json FILE]

MODEL is anything `paceline run` takes. Per model: perplexity of both (context 512, second half of
each window scored, as llama.cpp does), their ratio, mean KL(reference || native) and top-1
agreement. The reference interprets the family's plan in NumPy, in float32, over dequantised weights
and a float32 KV cache. It takes minutes for models above 0.5 B.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from paceline.backends.native import NativeBackend
from paceline.backends.reference import ReferenceBackend
from paceline.catalog import resolve
from paceline.measure.quality import compare_logits, limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint

PROSE = Path(__file__).parents[1] / "tests" / "data" / "northanger_abbey.txt"
CONTEXT = 512


def measure(model: str, num_characters: int, kv_dtype: str) -> dict[str, object]:
    """Return perplexities, KL and agreement of one model; both backends see the same windows."""
    checkpoint = open_checkpoint(resolve(model))
    token_ids = build_tokenizer(checkpoint.tokenizer).encode(PROSE.read_text()[:num_characters])
    kv, limits = limits_for(CONTEXT, block_size=16, rows=256)
    native, reference = NativeBackend(), ReferenceBackend()
    for backend, dtype in ((native, kv_dtype), (reference, "f32")):
        spec = replace(kv, dtype=dtype)
        backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=spec, limits=limits)
    losses: dict[str, list[float]] = {"native": [], "reference": []}
    fidelities = []
    started = time.monotonic()
    for start in range(0, len(token_ids) - CONTEXT + 1, CONTEXT):
        window = token_ids[start : start + CONTEXT]
        first = CONTEXT // 2
        pairs = zip(
            sequence_logits(reference, window[:-1], kv=kv, limits=limits, first=first),
            sequence_logits(native, window[:-1], kv=kv, limits=limits, first=first),
            strict=True,
        )
        row = first
        for ref, ours in pairs:
            targets = window[row + 1 : row + 1 + len(ref)]
            for name, logits in (("reference", ref), ("native", ours)):
                shifted = logits - logits.max(axis=1, keepdims=True)
                picked = shifted[np.arange(len(targets)), targets]
                losses[name] += (
                    np.log(np.exp(shifted).sum(axis=1, dtype=np.float64)) - picked
                ).tolist()
            fidelities.append(compare_logits(ref, ours))
            row += len(ref)
    isa = native.isa
    native.close()
    rows = sum(f.num_rows for f in fidelities)
    value = {name: math.exp(float(np.mean(loss))) for name, loss in losses.items()}
    difference = np.subtract(losses["native"], losses["reference"])
    return {
        "model": Path(model).name,
        "isa": isa,
        "kv_dtype": kv_dtype,
        "num_scored_tokens": rows,
        "perplexity_reference": value["reference"],
        "perplexity_native": value["native"],
        "ratio": value["native"] / value["reference"],
        "ratio_stderr": float(difference.std() / math.sqrt(len(difference))),
        "kl_mean": sum(f.kl_mean * f.num_rows for f in fidelities) / rows,
        "top1_agreement": sum(f.top1_agreement * f.num_rows for f in fidelities) / rows,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--characters", type=int, default=100_000)
    parser.add_argument("--kv-dtype", default="f16", choices=("f16", "bf16", "f32"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        row = measure(model, args.characters, args.kv_dtype)
        rows.append(row)
        print(
            f"{model}: perplexity {row['perplexity_native']:.4f} native, "
            f"{row['perplexity_reference']:.4f} reference, "
            f"ratio {row['ratio']:.5f} ± {row['ratio_stderr']:.5f}, KL {row['kl_mean']:.5f}, "
            f"top-1 {100 * float(str(row['top1_agreement'])):.2f} %, "
            f"{row['num_scored_tokens']} tokens",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
