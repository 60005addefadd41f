"""How many threads this process may keep busy, and why."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from paceline.errors import ParameterError

ENVIRONMENT = "PACELINE_NUM_THREADS"


def resolve_num_threads(explicit: int | None) -> tuple[int, str]:
    """Return (threads, reason): `explicit`, else PACELINE_NUM_THREADS, else the default."""
    if explicit is not None:
        return _checked(explicit, "num_threads"), "set explicitly"
    text = os.environ.get(ENVIRONMENT, "").strip()
    if text:
        try:
            value = int(text)
        except ValueError:
            raise ParameterError(
                f"{ENVIRONMENT} is {text!r}: it must be a number of threads", param="num_threads"
            ) from None
        return _checked(value, ENVIRONMENT), f"set by {ENVIRONMENT}"
    return default_num_threads()


def default_num_threads(root: Path = Path("/")) -> tuple[int, str]:
    """Return (threads, reason): the affinity mask, within the cgroup's CPU quota; at least 1.

    A quota of 1.5 CPUs is 1 thread: a second one would be throttled half of the time, and the
    first would wait for it at every op. `root` is where /proc and /sys lie.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(root)
    if quota is not None and quota < cores:
        return max(1, int(quota)), f"cgroup quota of {quota:g} CPUs"
    return cores, f"affinity mask of {cores} CPUs"


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Return the least CPU quota of this process's cgroup and its parents, in CPUs; None: no limit.

    Reads cgroup v2 (`cpu.max`) and v1 (`cpu.cfs_quota_us` / `cpu.cfs_period_us`). In a container
    the path in /proc/self/cgroup may not exist below the mount: then what exists above it counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    mount = root / "sys/fs/cgroup"
    quotas: list[float] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            quotas += _quotas(mount, path)
        elif "cpu" in controllers.split(","):
            for folder in (controllers, "cpu"):
                quotas += _quotas(mount / folder, path)
    return min(quotas, default=None)


def _quotas(mount: Path, path: str) -> list[float]:
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [quota for folder in folders if (quota := _read_quota(folder)) is not None]


def _read_quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cpus = int(quota) / int(period)  # "max" and -1 mean no limit
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cpus if cpus > 0 else None


def _checked(value: int, name: str) -> int:
    if not 1 <= value <= 1024:
        raise ParameterError(
            f"{name} is {value}: it must be between 1 and 1024", param="num_threads"
        )
    return value
