"""Speed of the linear kernels per weight format and number of rows, beside the core's own peak.

python benchmarks/kernels/linear.py [--format q4_1 ...] [--rows 1 8 512] [--shape 1536x576 ...]

Prints a table and a line of JSON. GMAC/s counts multiply-adds, GB/s the packed weight read once;
the shares are of what one core reaches (`paceline roofline` measures the same) times threads.
Times are the median and the best of repeated calls; activations are quantised inside the call.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline import _native
from paceline.measure.ceilings import measure_ceilings
from paceline.weights.repack import PackedTensor, pack_tensor
from paceline.weights.tensor import BLOCK, FLOAT_FORMATS, QTensor

HERE = Path(__file__).parent
SHAPES = ("1536x576", "576x1536", "49152x576", "4864x896", "8960x1536")  # outputs x inputs
FORMATS = ("q4_1", "q5_0", "q8_0", "q4_k", "q6_k", "bf16")
SECONDS = 0.3  # a measurement


def peak() -> dict[str, float]:
    """GMAC/s and GB/s of one core."""
    ceilings = measure_ceilings(1)
    return {
        "gmac_s": ceilings.int8_macs_s / 1e9,
        "f32_gmac_s": ceilings.f32_macs_s / 1e9,
        "gb_s": ceilings.memory_bytes_s / 1e9,
    }


def weight(fmt: str, rows: int, k: int) -> PackedTensor:
    block, size = BLOCK[fmt]
    return pack_tensor(QTensor(fmt, (rows, k), np.full((rows, k // block * size), 17, np.uint8)))


def measure(isa: str, packed: PackedTensor, num_rows: int, num_threads: int) -> list[float]:
    """Seconds of each call; the first, a warm-up, is left out."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, packed.k)).astype(np.float32)
    segments = [(packed.format, packed.data, packed.rows, packed.k, None)]
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        _native.linear(isa, x, segments, num_threads=num_threads)
        times.append(time.perf_counter() - start)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="+", default=FORMATS, choices=sorted(BLOCK))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--isa", default=_native.isas()[0])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    limit = peak()
    describe = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {args.isa}, {args.threads} threads; one core: {limit}")
    results: list[dict[str, Any]] = []
    for shape in args.shape:
        n, k = map(int, shape.split("x"))
        for fmt in args.format:
            if k % BLOCK[fmt][0]:
                continue
            packed = weight(fmt, n, k)
            for rows in args.rows:
                times = measure(args.isa, packed, rows, args.threads)
                best = min(times)
                gmac, gb = n * k * rows / best / 1e9, packed.data.nbytes / best / 1e9
                share = (
                    "" if fmt in FLOAT_FORMATS else f"{gmac / limit['gmac_s'] / args.threads:4.0%}"
                )
                print(
                    f"{shape:>11} {fmt:>6} rows {rows:4}  best {best * 1e6:8.0f} us  median "
                    f"{statistics.median(times) * 1e6:8.0f} us  {gmac:6.1f} GMAC/s {share:>4}  "
                    f"{gb:5.2f} GB/s {gb / limit['gb_s'] / args.threads:4.0%}",
                    flush=True,
                )
                results.append(
                    {
                        "shape": shape,
                        "format": fmt,
                        "rows": rows,
                        "best_s": best,
                        "times": len(times),
                    }
                )
    print(
        json.dumps(
            {
                "commit": commit,
                "isa": args.isa,
                "threads": args.threads,
                "peak": limit,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
