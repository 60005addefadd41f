"""Machine and Ceilings: reading what the system tells, and keeping what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.measure import ceilings as module
from paceline.measure.ceilings import (
    Cache,
    Ceilings,
    ReadSpeed,
    best_of,
    find_ceilings,
    known_ceilings,
    read_caches,
    thread_counts,
)
from paceline.measure.machine import Machine, busy_cores, cpu_model


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The thread counts that were measured; measuring is planted and its cache is empty."""
    counts: list[int] = []

    def measure_all(wanted, *, on_probe):
        counts.extend(wanted)
        return [ceilings_of(n) for n in wanted]

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "measure_all", measure_all)
    monkeypatch.setattr(module, "read_busy_cores", lambda: 0.1)
    return counts


def ceilings_of(num_threads: int) -> Ceilings:
    return Ceilings(
        num_threads=num_threads,
        int8_macs_s=4e9 * num_threads,
        bf16_macs_s=None,
        f32_macs_s=1e9 * num_threads,
        reads=(
            ReadSpeed(level="L1", capacity=100, bytes_s=9.0),
            ReadSpeed(level="memory", capacity=1000, bytes_s=2.0),
        ),
    )


def test_what_was_measured_once_is_kept(measured):
    assert known_ceilings() is None
    first = find_ceilings(1)
    assert first.busy_cores == 0.1
    del measured[:]
    assert find_ceilings(1) == first
    assert known_ceilings() == first
    assert measured == []


def test_refresh_measures_again(measured):
    find_ceilings(1)
    del measured[:]
    find_ceilings(1, refresh=True)
    assert 1 in measured


def test_only_a_thread_count_that_is_missing_is_measured(measured):
    known = find_ceilings(1)
    del measured[:]
    found = find_ceilings(77)
    assert measured == [77]
    assert found.at(77) == ceilings_of(77)
    assert found.at(1) == known.at(1)


def test_beside_others_it_is_measured_several_times_and_the_best_is_kept(measured, monkeypatch):
    quiet = find_ceilings(1)
    del measured[:]
    monkeypatch.setattr(module, "read_busy_cores", lambda: 1.5)
    slow = [(n, replace(ceilings_of(n), int8_macs_s=1.0)) for n in range(1, 100)]
    monkeypatch.setattr(module, "measure_all", lambda wanted, *, on_probe: [
        measured.append(n) or dict(slow)[n] for n in wanted
    ])  # fmt: skip
    found = find_ceilings(1, refresh=True)
    assert measured.count(1) == 3
    assert found.at(1) == quiet.at(1)
    assert found.busy_cores == 1.5


def test_on_a_quiet_machine_refresh_forgets_what_was(measured, monkeypatch):
    find_ceilings(1)
    lower = replace(ceilings_of(1), int8_macs_s=1.0)
    monkeypatch.setattr(module, "measure_all", lambda wanted, *, on_probe: [lower])
    assert find_ceilings(1, refresh=True).at(1) == lower


def test_more_threads_never_reach_less():
    one = ceilings_of(1)
    disturbed = replace(ceilings_of(2), int8_macs_s=1e9)
    found = best_of([disturbed, one])
    assert [c.num_threads for c in found] == [1, 2]
    assert found[1].int8_macs_s == one.int8_macs_s
    assert found[1].f32_macs_s == 2e9


def test_another_machine_is_another_measurement(measured, monkeypatch):
    find_ceilings(1)
    other = Machine(cpu="another", num_cores=1, quota=None, isa="avx2", version="0")
    assert known_ceilings(other) is None


def test_a_broken_file_is_measured_again(measured, tmp_path):
    find_ceilings(1)
    (file,) = (tmp_path / "machine").iterdir()
    file.write_text("{")
    del measured[:]
    find_ceilings(1)
    assert 1 in measured


def test_a_folder_that_cannot_be_written_costs_no_more_than_a_line(measured, monkeypatch, caplog):
    monkeypatch.setenv("PACELINE_HOME", "/proc/nowhere")
    assert find_ceilings(1).at(1) == ceilings_of(1)
    assert "measured again" in caplog.text


def test_a_working_set_is_read_from_the_smallest_level_that_holds_it():
    ceilings = ceilings_of(1)
    speeds = [ceilings.read_bytes_s(size) for size in (1, 100, 101, 1000, 10**9)]
    assert speeds == [9.0, 9.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 6]), (8, [1, 2, 3, 4, 8])]
)
def test_few_thread_counts_tell_enough(cores, counts):
    assert thread_counts(cores) == counts


def test_caches_are_read_from_the_system(tmp_path):
    for i, (level, kind, size, shared) in enumerate([
        (1, "Data", "32K", "0"), (1, "Instruction", "64K", "0"), (3, "Unified", "16M", "0-3,8"),
    ]):  # fmt: skip
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert read_caches(tmp_path) == [
        Cache(level="L1", num_bytes=32 * 2**10, num_sharing=1),
        Cache(level="L3", num_bytes=16 * 2**20, num_sharing=5),
    ]


@pytest.mark.parametrize(
    ("num_threads", "capacity"), [(1, 512), (2, 512), (3, 1024), (4, 1024), (64, 1024)]
)
def test_threads_beyond_the_cores_bring_no_caches_of_their_own(num_threads, capacity):
    cache = Cache(level="L2", num_bytes=512, num_sharing=2)
    assert cache.capacity(num_threads, num_cores=4) == capacity


def test_where_the_system_says_nothing_caches_are_the_usual_ones(tmp_path):
    assert [cache.level for cache in read_caches(tmp_path / "none")] == ["L1", "L2"]


def test_a_cpu_has_a_name_also_where_the_kernel_knows_none(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Zen 3\n\nmodel name\t: other\n")
    assert cpu_model(file) == "Zen 3"
    file.write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n")
    assert cpu_model(file) == "0x41 0xd0c"
    assert cpu_model(tmp_path / "none")


def test_busy_cores_are_the_time_that_was_not_idle():
    # user nice system idle iowait irq softirq steal
    before = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2\ncpu1 1 2\nintr 5\n"
    after = "cpu  140 0 60 830 60 0 10 0 0 0\ncpu0 1 2\ncpu1 1 2\nintr 6\n"
    assert busy_cores(before, after) == pytest.approx(2 * 60 / 100)
    assert busy_cores(before, before) == 0.0
