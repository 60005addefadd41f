"""The command line of run.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cells import CELLS, QUICK
from engines import ENGINES

_MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
_CELLS = [cell.name for cell in CELLS]
_ENGINES = [spec.name for spec in ENGINES]
_HELP = {
    "models": f"GGUF files or catalogue names, pulled if need be; default: {' '.join(_MODELS)}",
    "cells": f"of {', '.join(_CELLS)}; default: all that the context allows",
    "engines": f"of {', '.join(_ENGINES)}; default: all that are installed",
    "threads": "of every engine; default: as Paceline chooses",
    "rounds": "turns of each engine in a cell (5)",
    "quick": f"one round, no search for the best configurations; cells: {' '.join(QUICK)}",
    "python": "the Python that has an engine; default: this one",
    "json": "write the rows as JSON: to FILE, again after every cell, or to stdout instead of the "
    "table",
}


def parse_arguments(
    description: str | None, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Return the arguments; `python` is the path for each engine."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, **options: object) -> None:
        parser.add_argument(f"--{name}", help=_HELP[name], **options)  # type: ignore[arg-type]

    add("models", nargs="+", default=_MODELS, metavar="MODEL")
    add("cells", nargs="+", choices=_CELLS, metavar="CELL")
    add("engines", nargs="+", choices=_ENGINES, metavar="ENGINE")
    add("threads", type=int)
    add("rounds", type=int, default=5)
    add("quick", action="store_true")
    add("python", action="append", default=[], metavar="ENGINE=PATH")
    add("json", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}: it must be at least 1")
    pythons = dict.fromkeys(_ENGINES, sys.executable)
    for text in args.python:
        engine, _, path = text.partition("=")
        if engine not in pythons or not path:
            known = ", ".join(_ENGINES)
            parser.error(f"--python {text}: write ENGINE=PATH, ENGINE one of {known}")
        pythons[engine] = path
    args.python = pythons
    return args
