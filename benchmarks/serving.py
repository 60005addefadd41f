"""Paceline beside its peers as servers: three workloads, three rates, interleaved rounds.

Runs `paceline bench --serve MODEL --peer … --sweep …` once a workload and prints the table of
docs/bench.md. Example:

    python benchmarks/serving.py smollm2-135m --peer llama.cpp --peer openvino \
        --peer-python openvino=/path/to/python --json benchmarks/results/serving-smollm2.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# name -> (workload, objectives)
WORKLOADS: dict[str, tuple[str, Sequence[str]]] = {
    "chat": ("chat:max_input=1024,max_output=256", ["ttft=500ms,tpot=50ms"]),
    "code": ("code:output=128", ["ttft=500ms,tpot=50ms"]),
    "long prompt beside streams": (
        "mixed:share=0.1,long=4000,long_output=32,max_input=512,max_output=128",
        ["chat:ttft=500ms,tpot=50ms", "long:e2e=30s"],
    ),
}
RATES = "0.25,0.5,1"
PROGRAM = "from paceline.cli.main import main; main()"


def command(arguments: argparse.Namespace, workload: str, slo: Sequence[str]) -> list[str]:
    parts = [sys.executable, "-c", PROGRAM, "bench", "--serve", arguments.model, "--json",
             "--workload", workload, "--sweep", arguments.rates, "--duration", arguments.duration,
             "--warmup", arguments.warmup, "--drain", "30s", "--rounds", str(arguments.rounds),
             "--ignore-eos"]  # fmt: skip
    for flag, values in (("--peer", arguments.peer), ("--peer-python", arguments.peer_python),
                         ("--slo", slo)):  # fmt: skip
        for value in values:
            parts += [flag, value]
    for flag, value in (("--threads", arguments.threads), ("--serve-with", arguments.serve_with)):
        if value:
            parts += [flag, value]
    return parts


def table(name: str, document: dict[str, Any]) -> list[str]:
    """Return the rows of one workload: medians over the rounds."""
    cells: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for stage in document["stages"]:
        cells.setdefault((stage["rate"], stage["target"]), []).append(stage)
    rows = []
    for (rate, target), rounds in cells.items():

        def latency(metric: str, figure: str, rounds: Any = rounds) -> str:
            found = [s["latency_ms"][metric] for s in rounds if s["latency_ms"][metric]["count"]]
            if not found:
                return "-"
            value = statistics.median(f[figure]["value"] for f in found)
            return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"

        shares = [s["goodput"]["attainment_if_cut_missed"] for s in rounds]
        known = [share for share in shares if share is not None]
        output = statistics.median(s["throughput"]["output_tokens_per_s"] for s in rounds)
        cut_short = sum(s["requests"]["measured"] - s["requests"]["ok"] for s in rounds)
        rows.append(
            f"| {name} | {rate:g} | {target} | {latency('ttft', 'p50')} | {latency('ttft', 'p95')} "
            f"| {latency('tpot', 'mean')} | {latency('itl', 'p99')} | {output:.0f} "
            f"| {100 * statistics.median(known):.0f} % | {cut_short} |"
            if known
            else f"| {name} | {rate:g} | {target} | - | - | - | - | - | - | {cut_short} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--peer-python", action="append", default=[])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--duration", default="60s")
    parser.add_argument("--warmup", default="10s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="")
    parser.add_argument("--serve-with", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    documents: dict[str, Any] = {}
    lines = [
        "| workload | requests/s | server | TTFT p50 | TTFT p95 | TPOT | ITL p99 | output tok/s "
        "| within the objective | not ok |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in arguments.workloads.split(","):
        workload, slo = WORKLOADS[name]
        run = command(arguments, workload, slo)
        print("$ paceline " + " ".join(run[3:]), file=sys.stderr, flush=True)
        result = subprocess.run(run, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(result.returncode)
        documents[name] = json.loads(result.stdout)
        lines += table(name, documents[name])
        for row in documents[name]["comparison"]:
            if row["verdict"]:
                print(f"{name}, {row['rate']:g}/s, {row['metric']}: {row['verdict']} is better "
                      f"(ratio {row['ratio']['value']:.2f})", file=sys.stderr)  # fmt: skip
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=1) + "\n")


if __name__ == "__main__":
    main()
