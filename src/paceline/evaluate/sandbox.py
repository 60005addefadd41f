"""Sandbox: a program that a model wrote, run in a process with limits.

What it holds off: endless loops, memory and files without end, a program that exits early as if it
had passed, processes that outlive it, and, where `unshare` may make namespaces, the network.
What it does not: the program runs as you, so it can read what you can read and delete what you can
delete, and a hole in the kernel is a hole here. Run it in a container or a machine of its own.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

_CHILD = Path(__file__).with_name("sandbox_child.py")
_UNSHARE = ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child")


class Limits(Struct, frozen=True, kw_only=True):
    """What one program may take."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    num_files: int = 32


class Verdict(Struct, frozen=True, kw_only=True):
    """Whether a program ran to its end; `reason` is an exception's name, or how it was ended."""

    has_passed: bool
    reason: str


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the command that takes the network and other processes away, () where it may not."""
    found = shutil.which("unshare")
    if found is None:
        return ()
    command = (found, *_UNSHARE)
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else ()


def run_program(source: str, limits: Limits | None = None) -> Verdict:
    """Run Python `source` in an empty folder and return whether it came to its end.

    Its process group is killed when it is done or late. See the module for what this protects from.
    """
    limits = limits or Limits()
    token = secrets.token_hex(8)
    told = {
        "token": token, "RLIMIT_CPU": limits.cpu_s, "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes, "RLIMIT_NOFILE": limits.num_files, "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="paceline-eval-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as reply,
    ):
        given.write(json.dumps(told).encode() + b"\n" + source.encode(errors="replace"))
        given.seek(0)
        process = subprocess.Popen(
            [*isolation(), sys.executable, "-I", "-S", str(_CHILD)], stdin=given, stdout=reply,
            stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"},
        )  # fmt: skip
        is_late = False
        try:
            process.wait(timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reply.seek(0)
        said = reply.read(1000).decode(errors="replace")
    if is_late:
        return Verdict(has_passed=False, reason="time limit")
    if said == f"passed {token}":
        return Verdict(has_passed=True, reason="passed")
    return Verdict(has_passed=False, reason=said or f"ended early, code {process.returncode}")
