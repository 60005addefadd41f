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
from q8_copy import unreadable_formats, write_q8_copy
from rounds import Bench, progress, run_cell

from paceline.catalog import resolve
from paceline.cpu import resolve_num_threads
from paceline.engine.build import display_name
from paceline.errors import PacelineError
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint

_QUIET_CORES = 0.1  # what others may use before the output says so
_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        default=_MODELS,
        metavar="MODEL",
        help=f"GGUF files, or catalogue names, pulled if need be; default: {' '.join(_MODELS)}",
    )
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
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the rows as JSON, to stdout without FILE (the table is then not printed)",
    )
    args = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}: it must be at least 1")
    known = [spec.name for spec in ENGINES]
    pythons = dict.fromkeys(known, sys.executable)
    for text in args.python:
        engine, _, path = text.partition("=")
        if engine not in known or not path:
            parser.error(f"--python {text}: write ENGINE=PATH, ENGINE one of {', '.join(known)}")
        pythons[engine] = path
    args.python = pythons
    return args  # fmt: skip


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


def prepare(
    name: str, args: argparse.Namespace, specs: Sequence[EngineSpec], *, peak: Path | None,
    folder: Path,
) -> Bench:  # fmt: skip
    """Return what the cells of a model need. Copies for engines that cannot read it are written."""
    path = resolve(name)
    checkpoint = open_checkpoint(path)
    copies: dict[str, str] = {}
    for spec in specs:
        if spec.formats is None or not unreadable_formats(checkpoint, spec.formats):
            continue
        copy = folder / f"{path.stem}.q8_0.gguf"
        if not copy.exists():
            progress(f"{path.name}: writing a Q8_0 copy for {spec.name}")
            write_q8_copy(path, copy)
        copies[spec.name] = str(copy)
    session = Session(
        path=path,
        max_context=checkpoint.config.max_context,
        tokenizer=build_tokenizer(checkpoint.tokenizer),
        num_threads=args.threads,
        rounds=args.rounds,
        is_quick=args.quick,
        pythons=args.python,
        copies=copies,
    )
    return Bench(
        session=session,
        costs=model_costs(checkpoint),
        num_parameters=num_parameters(checkpoint),
        peak=peak,
    )


def run_model(bench: Bench, specs: Sequence[EngineSpec], cells: Sequence[Cell]) -> list[Row]:
    """Return the rows of one model, from the cells that its context allows."""
    session = bench.session
    name = display_name(str(session.path))
    found: list[Row] = []
    for wanted in cells:
        cell = fit(wanted, max_context=session.max_context, rounds=session.rounds)
        if cell is None:
            progress(f"{name}, {wanted.name}: the model's context is too short")
            continue
        progress(f"{name}, {cell.name}")
        found += rows(cell, name, run_cell(bench, cell, specs))
    return found


def ceilings_summary(measured: Sequence[Ceilings]) -> dict[str, Any]:
    """Return median and spread of each ceiling over the run, in GMAC/s and GB/s."""
    summary: dict[str, Any] = {}
    for field in dataclasses.fields(Ceilings):
        values = [getattr(c, field.name) for c in measured]
        if values and None not in values:
            name = field.name.replace("_macs_s", "_gmac_s").replace("_bytes_s", "_gb_s")
            summary[name] = _median_and_spread([value / 1e9 for value in values])
    return summary


def _median_and_spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {}
    return {"median": statistics.median(values), "spread": [min(values), max(values)]}


def machine() -> str:
    """Return the CPU's name as /proc gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return platform.machine()


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Run what the arguments ask for; return the report without its rows, and the rows."""
    args.threads = args.threads or resolve_num_threads(None)[0]
    args.rounds = 1 if args.quick else args.rounds
    names = args.cells or (QUICK if args.quick else [cell.name for cell in CELLS])
    cells = [cell for cell in CELLS if cell.name in names]
    specs, versions, absent = find_engines(args.engines, args.python)
    for engine in absent:
        progress(f"{engine} is not installed in {args.python[engine]}: left out")
    isa = chosen_isa()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        peak: Path | None = None
        try:
            peak = compile_peak(isa, folder)
        except PacelineError as error:
            progress(f"no shares: {error}")
        benches = [
            prepare(name, args, specs, peak=peak, folder=folder) for name in args.models
        ]  # fmt: skip
        found = [row for bench in benches for row in run_model(bench, specs, cells)]
    measured = [ceilings for bench in benches for ceilings in bench.ceilings]
    report = {
        "commit": commit(), "machine": machine(), "isa": isa, "threads": args.threads,
        "rounds": args.rounds, "engines": versions, "absent": absent,
        "q8_0_copies": {bench.session.path.name: [*bench.session.copies] for bench in benches},
        "ceilings": ceilings_summary(measured),
        "busy_cores": _median_and_spread([busy for bench in benches for busy in bench.busy]),
    }  # fmt: skip
    return report, found


def summary(report: dict[str, Any], found: Sequence[Row]) -> str:
    """Return what is printed: machine, table, configurations, ceilings."""
    versions = ", ".join(f"{name} {version}" for name, version in report["engines"].items())
    lines = [
        f"{report['machine']}, {report['threads']} threads, ISA {report['isa']}, commit "
        f"{report['commit']}, {report['rounds']} rounds; {versions}",
        *(f"{name}: not installed" for name in report["absent"]),
        "",
        table(found, list(report["engines"])),
        configurations(found),
        *(
            f"- {', '.join(engines)}: a Q8_0 copy of {model}"
            for model, engines in report["q8_0_copies"].items()
            if engines
        ),
        *(
            f"- ceiling {name}: {value['median']:.1f} ({value['spread'][0]:.1f}–"
            f"{value['spread'][1]:.1f})"
            for name, value in report["ceilings"].items()
        ),
    ]
    busy = report["busy_cores"]
    if busy and busy["spread"][1] > _QUIET_CORES:
        lines.append(
            f"- not quiet: others kept {busy['median']:.1f} ({busy['spread'][0]:.1f}–"
            f"{busy['spread'][1]:.1f}) cores busy"
        )
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    try:
        report, found = run(args)
    except PacelineError as error:
        sys.exit(f"error: {error}")
    text = json.dumps({**report, "rows": [dataclasses.asdict(row) for row in found]}, indent=1)
    if args.json == "-":
        print(text)
        return
    print(summary(report, found))
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
