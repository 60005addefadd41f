"""Instructions of the linear kernels per weight format and number of rows, counted by callgrind.

python benchmarks/kernels/instructions.py [--format q4_k ...] [--rows 1 4 ...] [--json FILE]

Counts do not depend on what else the machine does, so a change of a kernel shows on a loaded one as
well. A tile's unit is a group: 32 inputs times 16 outputs, for each row. Only one thread runs, with
the activations' quantisation inside. Wants `valgrind`, which knows AVX2 but not AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from linear import FORMATS, weight

from paceline import _native

OUTPUTS, INPUTS = 512, 1536
GROUPS = OUTPUTS // 16 * INPUTS // 32
CALLS = 20  # of a case: so that asking for its count weighs nothing
CASES = "PACELINE_CALLGRIND_CASES"  # holds the cases of a process that runs under callgrind


def control(action: str) -> None:
    """Have callgrind do something to this process: zero its counts, or dump them."""
    command = ["callgrind_control", action, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_cases(isa: str, cases: list[tuple[str, int]]) -> None:
    """Call each case CALLS times and dump the count, but for a first call that warms up."""
    for action in ("--zero", "--dump"):  # what they take the first time is not counted
        control(action)
    for fmt, rows in cases:
        packed = weight(fmt, OUTPUTS, INPUTS)
        segments = [(packed.format, packed.data, packed.rows, packed.k, None)]
        x = np.random.default_rng(0).standard_normal((rows, INPUTS)).astype(np.float32)
        _native.linear(isa, x, segments, num_threads=1)
        control("--zero")
        for _ in range(CALLS):
            _native.linear(isa, x, segments, num_threads=1)
        control("--dump")


def count(isa: str, cases: list[tuple[str, int]]) -> list[int]:
    """Return the instructions of each case, of a process under callgrind."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out",
            sys.executable, __file__, "--isa", isa,
        ]  # fmt: skip
        environment = {**os.environ, CASES: json.dumps(cases)}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        dumps = [Path(folder) / f"out.{idx + 2}" for idx in range(len(cases))]
        lines = [dump.read_text().splitlines() for dump in dumps]
    return [int(line.split()[1]) for dump in lines for line in dump if line.startswith("totals:")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="+", default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 64])
    parser.add_argument("--isa", default="avx2" if "avx2" in _native.isas() else "scalar")
    parser.add_argument("--json", type=Path, help="file for the counts")
    args = parser.parse_args()
    if CASES in os.environ:
        return run_cases(args.isa, json.loads(os.environ[CASES]))
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed: `apt-get install valgrind` brings it")
    cases = [(fmt, rows) for fmt in args.format for rows in args.rows]
    results = [
        {"format": fmt, "rows": rows, "a_group": round(n / CALLS / GROUPS / rows, 1)}
        for (fmt, rows), n in zip(cases, count(args.isa, cases), strict=True)
    ]
    print(f"{args.isa}, {OUTPUTS}x{INPUTS}: instructions for 32 inputs x 16 outputs x 1 row")
    for row in results:
        print(f"{row['format']:>8} rows {row['rows']:4} {row['a_group']:7}")
    if args.json is not None:
        args.json.write_text(json.dumps({"isa": args.isa, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
