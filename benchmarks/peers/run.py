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
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arguments import parse_arguments
from cells import CELLS, QUICK, Cell, fit
from engines import ENGINES, EngineSpec, installed_version, num_parameters
from figures import Row, configurations, rows, table
from measure import Session
from q8_copy import unreadable_formats, write_q8_copy
from rounds import Bench, progress, run_cell

from paceline.catalog import resolve
from paceline.cpu import resolve_num_threads
from paceline.engine.build import display_name
from paceline.errors import PacelineError
from paceline.measure.ceilings import Ceilings
from paceline.measure.floors import model_costs
from paceline.measure.machine import cpu_model, this_machine
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import open_checkpoint

_QUIET_CORES = 0.1  # what others may use before the output says so


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
    name: str, args: argparse.Namespace, specs: Sequence[EngineSpec], *, folder: Path
) -> Bench:
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
    )


def run_model(
    bench: Bench, specs: Sequence[EngineSpec], cells: Sequence[Cell]
) -> Iterator[list[Row]]:
    """Yield the rows of each cell that the model's context allows."""
    session = bench.session
    name = display_name(str(session.path))
    for wanted in cells:
        cell = fit(wanted, max_context=session.max_context, rounds=session.rounds)
        if cell is None:
            progress(f"{name}, {wanted.name}: the model's context is too short")
            continue
        progress(f"{name}, {cell.name}")
        yield rows(cell, name, run_cell(bench, cell, specs))


def ceilings_summary(measured: Sequence[Ceilings]) -> dict[str, Any]:
    """Return median and spread of each ceiling over the run, in GMAC/s and GB/s."""
    summary: dict[str, Any] = {}
    for field in ("int8_macs_s", "bf16_macs_s", "f32_macs_s", "memory_bytes_s"):
        values = [getattr(c, field) for c in measured]
        if values and None not in values:
            name = field.replace("_macs_s", "_gmac_s").replace("memory_bytes_s", "read_gb_s")
            summary[name] = _median_and_spread([value / 1e9 for value in values])
    return summary


def _median_and_spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {}
    return {"median": statistics.median(values), "spread": [min(values), max(values)]}


def commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def run(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Run what the arguments ask for; yield (report but for its rows, rows so far), a cell each."""
    args.threads = args.threads or resolve_num_threads(None)[0]
    args.rounds = 1 if args.quick else args.rounds
    names = args.cells or (QUICK if args.quick else [cell.name for cell in CELLS])
    cells = [cell for cell in CELLS if cell.name in names]
    specs, versions, absent = find_engines(args.engines, args.python)
    for engine in absent:
        progress(f"{engine} is not installed in {args.python[engine]}: left out")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        benches = [prepare(name, args, specs, folder=folder) for name in args.models]
        about = {
            "commit": commit(), "machine": cpu_model(), "isa": this_machine().isa,
            "threads": args.threads, "rounds": args.rounds, "engines": versions, "absent": absent,
            "q8_0_copies": {bench.session.path.name: [*bench.session.copies] for bench in benches},
        }  # fmt: skip
        found: list[Row] = []
        for bench in benches:
            for cell_rows in run_model(bench, specs, cells):
                found += cell_rows
                yield about | conditions(benches), found


def conditions(benches: Sequence[Bench]) -> dict[str, Any]:
    """Return what the machine was like: its ceilings, and the cores that others kept busy."""
    return {
        "ceilings": ceilings_summary([c for bench in benches for c in bench.ceilings]),
        "busy_cores": _median_and_spread([busy for bench in benches for busy in bench.busy]),
    }


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
    args = parse_arguments(__doc__)
    text = shown = ""
    try:
        for report, found in run(args):
            result = {**report, "rows": [dataclasses.asdict(row) for row in found]}
            text, shown = json.dumps(result, indent=1), summary(report, found)
            if args.json not in (None, "-"):
                Path(args.json).write_text(text + "\n")
    except PacelineError as error:
        sys.exit(f"error: {error}")
    print(text if args.json == "-" else shown)


if __name__ == "__main__":
    main()
