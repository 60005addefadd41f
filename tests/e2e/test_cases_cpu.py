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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_default_is_as_fast_as_the_same_number_set_by_hand(tmp_path):
    """CPU-01: a mask of two CPUs against `--threads 2`, in turns, the best of each."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    path = script_model(tmp_path)
    prefix = ("taskset", "-c", cpus)
    with (
        ServeProcess(path, "--kv-memory", "4M", prefix=prefix) as default,
        ServeProcess(path, "--kv-memory", "4M", "--threads", "2", prefix=prefix) as explicit,
    ):
        assert "2 threads (" in default.log
        best = {"default": 9.0, "explicit": 9.0}
        for _ in range(15):
            for name, server in (("default", default), ("explicit", explicit)):
                start = time.monotonic()
                server.complete("0", temperature=0, max_tokens=400)
                best[name] = min(best[name], time.monotonic() - start)
    assert best["explicit"] >= 0.85 * best["default"]
