"""Machine: what measurements depend on, and the folder that keeps them from start to start."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from paceline import __version__
from paceline.cpu import cgroup_quota

_BUSY_S = 0.2

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value", bound=Struct)


class Machine(Struct, frozen=True, kw_only=True):
    """The fingerprint of a machine as this process sees it; another one is measured anew."""

    cpu: str
    num_cores: int  # in the affinity mask
    quota: float | None  # CPUs that the cgroup grants
    isa: str
    version: str


def this_machine() -> Machine:
    """Return the machine that this process runs on, with the ISA that its kernels use."""
    from paceline import _native

    return Machine(
        cpu=cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        quota=cgroup_quota(),
        isa=os.environ.get("PACELINE_ISA") or str(_native.isas()[0]),
        version=__version__,
    )


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name; on ARM, where the kernel knows none, implementer and part."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    parts = [fields[key] for key in ("CPU implementer", "CPU part") if key in fields]
    return fields.get("model name") or " ".join(parts) or platform.machine()


def busy_cores(before: str, after: str) -> float:
    """Return how many cores were busy on average between two readings of /proc/stat."""
    first, last = (_ticks(text) for text in (before, after))
    total = sum(last) - sum(first)
    num_idle = sum(last[3:5]) - sum(first[3:5])  # idle, and waiting for a disk
    num_cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    return num_cores * (1 - num_idle / total) if total > 0 else 0.0


def _ticks(stat: str) -> list[int]:
    return [int(field) for field in stat.splitlines()[0].split()[1:9]]


def read_busy_cores() -> float:
    """Return how many cores are busy now, over a fifth of a second; 0 where nobody tells.

    Asked while this process waits, it says whether others use the machine.
    """
    path = Path("/proc/stat")
    try:
        before = path.read_text()
        time.sleep(_BUSY_S)
        return busy_cores(before, path.read_text())
    except OSError:
        return 0.0


def cache_file(kind: str, *what: object) -> Path:
    """Return where a measurement of `kind` is kept that depends on `what`."""
    from paceline.catalog.store import home

    digest = hashlib.sha256("\n".join(map(repr, what)).encode()).hexdigest()[:16]
    return home() / "machine" / f"{kind}-{digest}.json"


def read_cached(path: Path, kind: type[_Value]) -> _Value | None:
    """Return what was kept at `path`; None where there is nothing that this build can read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def write_cached(path: Path, value: Struct) -> None:
    """Keep `value` at `path`, whole or not at all. A folder that cannot be written costs a line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
        partial.replace(path)
    except OSError as error:
        logger.warning("%s cannot be kept (%s): it will be measured again", path, error.strerror)
