"""Children: each candidate is made and measured in a process of its own, which leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

_TETHER = Path(__file__).parents[1] / "bench" / "tether.py"
_CLI = "from paceline.cli.main import main; main()"
_SPEED = "from paceline.price.speed import main; main()"


def run_command(arguments: Sequence[str], what: str) -> dict[str, Any]:
    """Return what a command of `paceline` prints with --json; its error is told as that of `what`.

    The command ends with this process, also when that is killed.
    """
    return _run([_CLI, *arguments], what)


def run_speed(spec: str, what: str) -> dict[str, Any]:
    """Return what `price/speed.py` measures for `spec`, a JSON object."""
    return _run([_SPEED, spec], what)


def _run(arguments: Sequence[str], what: str) -> dict[str, Any]:
    tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid())]
    done = subprocess.run(
        [*tether, sys.executable, "-c", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    if done.returncode < 0:
        raise PacelineError(
            f"{what}: the process was ended by signal {-done.returncode}"
            + (" (out of memory?)" if done.returncode == -9 else "")
            + "; what is measured is kept, and the same command goes on"
        )
    said = [line for line in done.stderr.splitlines() if line.strip()]
    reason = said[-1].removeprefix("paceline: ") if said else f"exit code {done.returncode}"
    raise PacelineError(f"{what}: {reason}")
