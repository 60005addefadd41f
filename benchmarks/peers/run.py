"""Paceline beside llama.cpp, OpenVINO GenAI and transformers: speed, and share of the ceilings.

    python benchmarks/peers/run.py --models smollm2-135m model.gguf [--rounds 5] [--json out.json]

Peers that are not installed are named and left out; a peer may live in a Python of its own:

    python benchmarks/peers/run.py --python llama.cpp=/venvs/llama/bin/python

Each engine runs in its own process and is stopped while another one is measured. A table entry is
the median (least–greatest), the share of the cell's floor, and **how many times better Paceline
is**. docs/benchmarks.md says what the cells, the floor and each engine's configuration are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ceilings import chosen_isa, compile_peak
from cells import CELLS, QUICK, Cell, fit
from engines import ENGINES, EngineSpec, installed_version, num_parameters
from figures import Row, configurations, rows, table
from floors import Ceilings, model_costs
from measure import Session
from rounds import Bench, progress, run_cell

from paceline.catalog import resolve
from paceline.cpu import resolve_num_threads
from paceline.engine.build import display_name
from paceline.errors import PacelineError
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint

_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", default=_MODELS, help="GGUF files or catalogue names")
    add("--cells", nargs="+", choices=[c.name for c in CELLS], help="default: all that fit")
    add("--engines", nargs="+", choices=[e.name for e in ENGINES], help="default: all")
    add("--threads", type=int, help="of every engine; default: as Paceline chooses")
    add("--rounds", type=int, default=5, help="turns of each engine in a cell (5)")
    add(
        "--quick",
        action="store_true",
        help=f"one round, no search for the best configurations; cells: {' '.join(QUICK)}",
    )
    add(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="the Python that has an engine; default: this one",
    )
    add(
        "--model-for",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="another file of the model for an engine that cannot read it",
    )
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the rows as JSON, to stdout without FILE (the table is then not printed)",
    )
    args = parser.parse_args(arguments)
    for name in ("python", "model_for"):
        setattr(args, name, _by_engine(parser, name, getattr(args, name)))
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: it must be at least 1")
    return args  # fmt: skip


def _by_engine(parser: argparse.ArgumentParser, name: str, given: list[str]) -> dict[str, str]:
    known = [spec.name for spec in ENGINES]
    pairs = {}
    for text in given:
        engine, _, value = text.partition("=")
        if engine not in known or not value:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} {text}: write ENGINE=PATH, ENGINE one of {', '.join(known)}")
        pairs[engine] = value
    return pairs


def find_engines(
    wanted: Sequence[str] | None, pythons: dict[str, str]
) -> tuple[list[EngineSpec], dict[str, str], list[str]]:
    """Return (engines to run, their versions, names of those that are not installed)."""
    specs, versions, absent = [], {}, []
    for spec in ENGINES:
        if wanted is not None and spec.name not in wanted:
            continue
        version = installed_version(spec, pythons[spec.name])
        if version is None:
            absent.append(spec.name)
        else:
            specs.append(spec)
            versions[spec.name] = version
    return specs, versions, absent


def run_model(
    name: str, args: argparse.Namespace, specs: Sequence[EngineSpec], cells: Sequence[Cell],
    peak: Path | None,
) -> tuple[list[Row], list[Ceilings]]:  # fmt: skip
    """Return the rows of one model, and the ceilings that were measured on the way."""
    path = resolve(name)
    checkpoint = open_checkpoint(path)
    session = Session(
        path=path,
        tokenizer=build_tokenizer(checkpoint.tokenizer),
        num_threads=args.threads,
        rounds=args.rounds,
        is_quick=args.quick,
        pythons=args.python,
        models=args.model_for,
    )
    bench = Bench(
        session=session,
        costs=model_costs(checkpoint),
        num_parameters=num_parameters(checkpoint),
        peak=peak,
    )
    found: list[Row] = []
    shown = display_name(str(path))
    for wanted in cells:
        cell = fit(wanted, max_context=checkpoint.config.max_context, rounds=args.rounds)
        if cell is None:
            progress(f"{shown}, {wanted.name}: the model's context is too short")
            continue
        progress(f"{shown}, {cell.name}")
        found += rows(cell, shown, run_cell(bench, cell, specs))
    return found, bench.ceilings


def ceilings_summary(measured: Sequence[Ceilings]) -> dict[str, Any]:
    """Return median and spread of each ceiling over the run, in GMAC/s and GB/s."""
    summary: dict[str, Any] = {}
    for field in dataclasses.fields(Ceilings):
        values = [getattr(c, field.name) for c in measured]
        if values and None not in values:
            name = field.name.replace("_macs_s", "_gmac_s").replace("_bytes_s", "_gb_s")
            scaled = [value / 1e9 for value in values]
            summary[name] = {
                "median": statistics.median(scaled), "spread": [min(scaled), max(scaled)],
            }  # fmt: skip
    return summary


def machine() -> str:
    """Return the CPU's name as /proc gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return platform.machine()


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the arguments ask for; return the report."""
    args.threads = args.threads or resolve_num_threads(None)[0]
    args.rounds = 1 if args.quick else args.rounds
    args.python = {spec.name: args.python.get(spec.name, sys.executable) for spec in ENGINES}
    names = args.cells or (QUICK if args.quick else [cell.name for cell in CELLS])
    specs, versions, absent = find_engines(args.engines, args.python)
    for engine in absent:
        progress(f"{engine} is not installed in {args.python[engine]}: left out")
    report: dict[str, Any] = {
        "commit": commit(), "machine": machine(), "isa": chosen_isa(), "threads": args.threads,
        "rounds": args.rounds, "engines": versions, "absent": absent,
    }  # fmt: skip
    all_rows: list[Row] = []
    measured: list[Ceilings] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            peak = compile_peak(chosen_isa(), Path(folder))
        except PacelineError as error:
            progress(f"no shares: {error}")
            peak = None
        for name in args.models:
            cells = [cell for cell in CELLS if cell.name in names]
            found, ceilings = run_model(name, args, specs, cells, peak)
            all_rows += found
            measured += ceilings
    report["ceilings"] = ceilings_summary(measured)
    report["rows"] = [dataclasses.asdict(row) for row in all_rows]
    engines = [spec.name for spec in specs]
    report["table"] = f"{table(all_rows, engines)}\n{configurations(all_rows)}"
    return report


def main() -> None:
    args = parse_arguments()
    report = run(args)
    text = report.pop("table")
    if args.json == "-":
        print(json.dumps(report, indent=1))
        return
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
