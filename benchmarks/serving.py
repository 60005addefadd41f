"""Paceline beside its peers as servers: three workloads at three rates, in interleaved rounds.

    python benchmarks/serving.py smollm2-135m --peer llama.cpp --peer openvino \
        --peer-python openvino=/path/to/python --json benchmarks/results/serving-smollm2.json

All servers are up throughout; `paceline bench` loads them in turn. With `--json FILE` each cell is
written as it ends, and a run that was stopped goes on where it was. Prints the table of
docs/bench.md. With three peers the whole takes 25 minutes at most, and less where they keep up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.servers import PEERS, Settings, running
from paceline.bench.units import format_ms
from paceline.cli.bench_values import check_names, server_settings
from paceline.errors import PacelineError

# name -> (workload, objectives)
WORKLOADS: dict[str, tuple[str, Sequence[str]]] = {
    "chat": ("chat:max_input=1024,max_output=128", ["ttft=500ms,tpot=50ms"]),
    "code": ("code:output=96", ["ttft=500ms,tpot=50ms"]),
    "long prompt beside streams": (
        "mixed:share=0.2,long=4000,long_output=32,max_input=512,max_output=96",
        ["chat:ttft=500ms,tpot=50ms", "long:e2e=30s"],
    ),
}
PROGRAM = "from paceline.cli.main import main; main()"
HEAD = (
    "| workload | requests/s | server | TTFT p50 | TTFT p95 | TPOT | ITL p99 | output tok/s "
    "| within the objective | cut | failed |"
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file or a catalogue name")
    parser.add_argument("--peer", action="append", default=[], help=f"one of {', '.join(PEERS)}")
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PATH",
                        help="the Python that has that peer")  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rates", default="0.5,1,2", help="requests a second (0.5,1,2)")
    parser.add_argument("--duration", default="8s", help="window of a server in a round (8s)")
    parser.add_argument("--warmup", default="2s", help="before each window (2s)")
    parser.add_argument("--drain", default="3s",
                        help="wait for late answers; then they are cut (3s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a cell (3)")
    parser.add_argument("--threads", type=int, help="of every server; default: all cores")
    parser.add_argument("--serve-with", help="more options of `paceline serve`, in quotes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what to write, or to go on with")
    return parser.parse_args(arguments)


def cells(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the options of `paceline bench` by cell."""
    found = {}
    for name, rate in itertools.product(arguments.workloads, arguments.rates.split(",")):
        workload, objectives = WORKLOADS[name]
        options = ["--workload", workload, "--rate", rate, "--duration", arguments.duration,
                   "--warmup", arguments.warmup, "--drain", arguments.drain,
                   "--rounds", str(arguments.rounds), "--ignore-eos"]  # fmt: skip
        for objective in objectives:
            options += ["--slo", objective]
        found[f"{name}, {rate}/s"] = options
    return found


def about(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Return what a run must share with the one that it goes on with."""
    versions = {}
    for peer in arguments.peer:
        package = PEERS[peer][1].split()[0]
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        python = settings.pythons.get(peer, sys.executable)
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        versions[peer] = f"{package} {done.stdout.strip() or '?'}"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    return {
        "model": settings.model.name, "threads": settings.num_threads, "peers": versions,
        "serve_with": arguments.serve_with, "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }  # fmt: skip


def read_report(path: Path | None, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the report to go on with. Exits where it is another run's."""
    fresh = {"about": shared, "cells": {}}
    if path is None or not path.exists():
        return fresh
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in shared.items():
        before = report.get("about", {}).get(name)
        if before != value:
            sys.exit(f"{path} is of another run ({name} {before}, now {value}): name another file")
    return report


def run_cell(servers: Sequence[tuple[str, str]], options: Sequence[str]) -> dict[str, Any]:
    targets = [part for name, url in servers for part in ("--target", f"{name}={url}")]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "bench", *targets, *options, "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if result.returncode:
        sys.exit(result.returncode)
    document: dict[str, Any] = json.loads(result.stdout)
    return {"options": list(options), "stages": document["stages"],
            "comparison": document["comparison"]}  # fmt: skip


def rows(name: str, cell: dict[str, Any]) -> list[str]:
    """Return a row a server: medians over the rounds of percentiles, sums of counts."""
    by_server: dict[str, list[dict[str, Any]]] = {}
    for stage in cell["stages"]:
        by_server.setdefault(stage["target"], []).append(stage)
    workload, rate = name.rsplit(", ", 1)
    return [
        f"| {workload} | {rate.removesuffix('/s')} | {server} | {' | '.join(figures(rounds))} |"
        for server, rounds in by_server.items()
    ]


def figures(rounds: Sequence[dict[str, Any]]) -> list[str]:
    def latency(metric: str, figure: str) -> str:
        found = [s["latency_ms"][metric] for s in rounds if s["latency_ms"][metric]["count"]]
        if not found:
            return "-"
        return format_ms(statistics.median(f[figure]["value"] for f in found) / 1e3)

    def total(section: str, name: str) -> int:
        return int(sum(stage[section][name] for stage in rounds))

    met, cut = total("goodput", "met"), total("requests", "cut")
    judged = met + total("goodput", "missed") + cut
    failed = total("requests", "measured") - total("requests", "ok") - cut
    output = statistics.median(stage["throughput"]["output_tokens_per_s"] for stage in rounds)
    return [
        latency("ttft", "p50"), latency("ttft", "p95"), latency("tpot", "mean"),
        latency("itl", "p99"), f"{output:.0f}",
        f"{met} of {judged} ({100 * met / judged:.0f} %)" if judged else "-",
        str(cut), str(failed),
    ]  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name, cell in report["cells"].items():
        lines += rows(name, cell)
    verdicts = [
        f"- {name}: {row['metric']}, {row['verdict']} is better than "
        f"{row['other'] if row['verdict'] == row['first'] else row['first']} "
        f"(ratio {row['ratio']['value']:.2f}, {row['ratio']['low']:.2f} to "
        f"{row['ratio']['high']:.2f})"
        for name, cell in report["cells"].items()
        for row in cell["comparison"]
        if row["verdict"]
    ]
    return "\n".join([*lines, "", *verdicts])


def main(texts: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(texts)
    names = ["paceline", *arguments.peer]
    try:
        check_names(names, arguments.peer)
        settings = server_settings(arguments.model, arguments.serve_with, arguments.peer_python,
                                   arguments.threads, None, None)  # fmt: skip
        report = read_report(arguments.json, about(arguments, settings))
        missing = {
            name: options
            for name, options in cells(arguments).items()
            if report["cells"].get(name, {}).get("options") != options
        }
        if missing:
            with running(names, settings) as servers:
                for name, options in missing.items():
                    began = time.monotonic()
                    report["cells"][name] = run_cell(servers, options)
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
                    took = time.monotonic() - began
                    print(f"{name}: {took:.0f} s", file=sys.stderr, flush=True)
    except PacelineError as error:
        sys.exit(f"error: {error}")
    print(table(report))
    print("\nOne cell again:")
    alone = ["paceline", "bench", "--serve", arguments.model]
    for flag, values in (("--peer", arguments.peer), ("--peer-python", arguments.peer_python)):
        for value in values:
            alone += [flag, value]
    print(shlex.join(alone), *map(shlex.quote, next(iter(cells(arguments).values()))))


if __name__ == "__main__":
    main()
