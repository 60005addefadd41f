"""Thread count from fake masks and cgroup trees (case CPU-01), and the choice of ISA."""

import os
import subprocess
import sys

import pytest

from paceline.cpu import cgroup_quota, default_num_threads, resolve_num_threads
from paceline.errors import ParameterError


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.delenv("PACELINE_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "0::/kube/pod/ctr\n"
V1 = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n"
CASES = {
    "v2 quota of two": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "200000 100000\n"},
        2,
    ),
    "v2 quota of one and a half": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "150000 100000"},
        1,
    ),
    "v2 quota below one": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "20000 100000"},
        1,
    ),
    "v2 parent is tighter": (
        {
            "proc/self/cgroup": V2,
            "sys/fs/cgroup/kube/pod/ctr/cpu.max": "800000 100000",
            "sys/fs/cgroup/kube/cpu.max": "300000 100000",
        },
        3,
    ),
    "v2 inside a container namespace": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000"},
        4,
    ),
    "v2 path of the host, seen from inside": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "400000 100000"},
        4,
    ),
    "v2 no limit": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "max 100000"},
        16,
    ),
    "v2 quota above the mask": (
        {"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "6400000 100000"},
        16,
    ),
    "v1 quota": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
        2,
    ),
    "v1 no limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000",
        },
        16,
    ),
    "broken files": ({"proc/self/cgroup": V2, "sys/fs/cgroup/kube/pod/ctr/cpu.max": "lots\n"}, 16),
    "no cgroups at all": ({}, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_default_is_the_mask_within_every_quota(tmp_path, cores, name):
    files, want = CASES[name]
    num_threads, reason = default_num_threads(tree(tmp_path, files))
    assert num_threads == want
    assert ("quota" in reason) == (want < 16)


def test_quota_is_none_without_a_limit(tmp_path):
    assert cgroup_quota(tmp_path) is None


def test_affinity_mask_is_obeyed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    assert default_num_threads(tmp_path) == (2, "affinity mask of 2 CPUs")


def test_explicit_setting_wins_over_environment_and_machine(cores, monkeypatch):
    monkeypatch.setenv("PACELINE_NUM_THREADS", "3")
    assert resolve_num_threads(40) == (40, "set explicitly")
    assert resolve_num_threads(None) == (3, "set by PACELINE_NUM_THREADS")


@pytest.mark.parametrize("text", ["0", "-2", "many", "1.5"])
def test_bad_environment_setting_is_named(cores, monkeypatch, text):
    monkeypatch.setenv("PACELINE_NUM_THREADS", text)
    with pytest.raises(ParameterError, match=r"PACELINE_NUM_THREADS"):
        resolve_num_threads(None)


def test_zero_threads_are_refused():
    with pytest.raises(ParameterError, match="num_threads is 0"):
        resolve_num_threads(0)


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_environment_forces_an_isa():
    done = run_python(
        "from paceline import _native; print(_native.active_isa())", PACELINE_ISA="scalar"
    )
    assert done.stdout == "scalar\n"


def test_unknown_isa_is_an_error_that_names_the_usable_ones_and_only_when_used():
    code = "from paceline import _native; print(_native.isas()); _native.active_isa()"
    done = run_python(code, PACELINE_ISA="avx9000")
    assert "scalar" in done.stdout  # importing works
    assert "PACELINE_ISA is 'avx9000'" in done.stderr
    assert "scalar" in done.stderr.splitlines()[-1]
    assert done.returncode == 1
