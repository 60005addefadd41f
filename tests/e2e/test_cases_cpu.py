"""Case CPU-01 on the real process; quotas and cpusets as fake trees are in unit/test_cpu.py."""

from __future__ import annotations

import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.live import ServeProcess, script_model

pytestmark = pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
HERTZ = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time of every thread of a process."""
    used = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        used[task.name] = (int(fields[11]) + int(fields[12])) / HERTZ
    return used


def num_busy_threads(server: ServeProcess, *, for_s: float) -> int:
    """Return how many threads take part in the work of four endless answers."""
    before = cpu_seconds(server.process.pid)
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        while time.monotonic() - start < for_s:
            list(pool.map(lambda _: server.complete("0", temperature=0, max_tokens=400), range(4)))
    spent = time.monotonic() - start
    after = cpu_seconds(server.process.pid)
    return sum(after[tid] - before.get(tid, 0) > 0.1 * spent for tid in after)


def test_the_default_obeys_the_mask_and_says_why(tmp_path):
    """CPU-01: one CPU, so one native thread; beside it only the event loop is ever busy."""
    cpu = str(min(os.sched_getaffinity(0)))
    path = script_model(tmp_path)
    with ServeProcess(path, "--kv-memory", "4M", prefix=("taskset", "-c", cpu)) as server:
        assert re.search(r"\b1 threads \(affinity mask of 1 CPU", server.log), server.log
        assert num_busy_threads(server, for_s=1.0) <= 2
        server.survive()


def test_an_explicit_number_wins_over_the_mask(tmp_path):
    """CPU-01."""
    cpu = str(min(os.sched_getaffinity(0)))
    path = script_model(tmp_path)
    options = ("--kv-memory", "4M", "--threads", "2")
    with ServeProcess(path, *options, prefix=("taskset", "-c", cpu)) as server:
        assert "2 threads (set explicitly)" in server.log
        server.survive()


def workings(server: ServeProcess) -> dict[str, object]:
    """Return what decides how fast a server is, but its options: threads, and where they run."""
    server.survive()
    tasks = list(Path(f"/proc/{server.process.pid}/task").iterdir())
    return {
        "native threads": re.findall(r"\b(\d+) threads \(", server.log),
        "names": sorted((task / "comm").read_text() for task in tasks),
        "masks": sorted(sorted(os.sched_getaffinity(int(task.name))) for task in tasks),
        "kv": re.findall(r"KV cache.*", server.log),
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_default_works_as_the_same_number_set_by_hand(tmp_path):
    """CPU-01: under a mask of two CPUs nothing that takes time differs from `--threads 2`."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    path = script_model(tmp_path)
    options = ("--kv-memory", "4M")
    prefix = ("taskset", "-c", cpus)
    with ServeProcess(path, *options, prefix=prefix) as server:
        default = workings(server)
    with ServeProcess(path, *options, "--threads", "2", prefix=prefix) as server:
        explicit = workings(server)
    assert default["native threads"] == ["2"]
    assert default == explicit
