"""Ceilings: what a machine reaches at best: multiply-adds, and reading by working set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from paceline.cpu import default_num_threads
from paceline.measure.machine import (
    Machine,
    cache_file,
    read_busy_cores,
    read_cached,
    this_machine,
    write_cached,
)

_SECONDS = 0.12  # of one probe; of a cache a third
# Beyond every cache: a virtual machine may tell of one last-level cache where its cores have two.
_MEMORY_SET = 512 * 2**20
QUIET_CORES = 0.2  # what others may use before it is measured several times, and told
_BUSY_ROUNDS = 3
_CPU0 = Path("/sys/devices/system/cpu/cpu0/cache")
# Where the system does not tell: what most CPUs have. (name, bytes, cores that share it)
_USUAL_CACHES = (("L1", 32 * 2**10, 1), ("L2", 512 * 2**10, 1))
OnProbe = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


class ReadSpeed(Struct, frozen=True, kw_only=True):
    """Reading a working set that fits `capacity` bytes."""

    level: str  # L1, L2, L3 or memory
    capacity: int  # of all threads' caches together; of memory: the set that was read
    bytes_s: float


class Ceilings(Struct, frozen=True, kw_only=True):
    """What `num_threads` threads reach together. `reads` begins with the smallest working set."""

    num_threads: int
    int8_macs_s: float
    bf16_macs_s: float | None  # None where the ISA has no bf16 dot product
    f32_macs_s: float
    reads: tuple[ReadSpeed, ...]

    @property
    def attention_macs_s(self) -> float:
        return self.f32_macs_s if self.bf16_macs_s is None else self.bf16_macs_s

    @property
    def memory_bytes_s(self) -> float:
        return self.reads[-1].bytes_s

    def read_bytes_s(self, working_set: float) -> float:
        """Return the speed of the smallest level that holds `working_set` bytes."""
        held = (read.bytes_s for read in self.reads if working_set <= read.capacity)
        return next(held, self.memory_bytes_s)


class MachineCeilings(Struct, frozen=True, kw_only=True):
    """A machine's ceilings, by number of threads, the fewest first."""

    machine: Machine
    measured_at: float  # Unix seconds
    busy_cores: float  # that others used just before: where it is not small, measure again
    by_threads: tuple[Ceilings, ...]

    def at(self, num_threads: int) -> Ceilings | None:
        return next((c for c in self.by_threads if c.num_threads == num_threads), None)


class Cache(Struct, frozen=True, kw_only=True):
    """A data cache: its bytes, and how many cores share one."""

    level: str
    num_bytes: int
    num_sharing: int

    def capacity(self, num_threads: int, num_cores: int) -> int:
        """Return the bytes that so many threads have of it together: no more than their cores."""
        return self.num_bytes * -(-min(num_threads, num_cores) // self.num_sharing)


def known_ceilings(machine: Machine | None = None) -> MachineCeilings | None:
    """Return what was measured before on this machine; nothing is measured now."""
    return read_cached(cache_file("ceilings", machine or this_machine()), MachineCeilings)


def known_int8_macs(num_threads: int) -> float:
    """Return the int8 peak of so many threads that was measured before; 0: none was."""
    known = known_ceilings()
    found = None if known is None else known.at(num_threads)
    return 0.0 if found is None else found.int8_macs_s


def find_ceilings(
    num_threads: int,
    *,
    refresh: bool = False,
    on_probe: OnProbe = lambda name, done, total: None,
) -> MachineCeilings:
    """Return this machine's ceilings, `num_threads` among them; what is missing is measured."""
    machine = this_machine()
    known = None if refresh else known_ceilings(machine)
    if known is not None and known.at(num_threads) is not None:
        return known
    busy = read_busy_cores()
    rounds = 1 if busy <= QUIET_CORES else _BUSY_ROUNDS
    counts = sorted({*thread_counts(default_num_threads()[0]), num_threads})
    if known is not None:
        counts = [count for count in counts if known.at(count) is None]
    measured = [measure_all(counts, on_probe=on_probe) for _ in range(rounds)]
    before = known_ceilings(machine) if refresh and rounds > 1 else known
    all_known = [ceilings for found in measured for ceilings in found]
    all_known += [] if before is None else before.by_threads
    found = MachineCeilings(
        machine=machine,
        measured_at=time.time(),
        busy_cores=busy,
        by_threads=best_of(all_known),
    )
    write_cached(cache_file("ceilings", machine), found)
    return found


def best_of(measured: Iterable[Ceilings]) -> tuple[Ceilings, ...]:
    """Return one for each number of threads, the fewest first: the best of each figure.

    A ceiling is what was reached, so a better reading is a truer one; and what some threads reach
    more threads reach, too.
    """
    best: dict[int, Ceilings] = {}
    for ceilings in measured:
        same = best.get(ceilings.num_threads)
        best[ceilings.num_threads] = ceilings if same is None else _better(ceilings, same)
    found: list[Ceilings] = []
    for num_threads in sorted(best):
        one = best[num_threads]
        found.append(_better(one, found[-1]) if found else one)
    return tuple(found)


def _better(one: Ceilings, other: Ceilings) -> Ceilings:
    """Return `one` with the figures of `other` where they are better."""
    others = {read.level: read.bytes_s for read in other.reads}
    bf16 = [c.bf16_macs_s for c in (one, other) if c.bf16_macs_s is not None]
    return Ceilings(
        num_threads=one.num_threads,
        int8_macs_s=max(one.int8_macs_s, other.int8_macs_s),
        bf16_macs_s=max(bf16, default=None),
        f32_macs_s=max(one.f32_macs_s, other.f32_macs_s),
        reads=tuple(
            replace(read, bytes_s=max(read.bytes_s, others.get(read.level, 0.0)))
            for read in one.reads
        ),
    )


def thread_counts(num_threads: int) -> list[int]:
    """Return 1 … 4, then powers of two, and `num_threads`: the counts that are measured."""
    counts = [n for n in range(1, num_threads) if n <= 4 or n & (n - 1) == 0]
    return [*counts, num_threads]


def measure_all(
    counts: Iterable[int], *, on_probe: OnProbe = lambda name, done, total: None
) -> list[Ceilings]:
    """Measure now: about half a second for each of the counts."""
    counts, caches = list(counts), read_caches()
    num_probes = len(counts) * (4 + len(caches))
    num_done = 0

    def tell(name: str) -> None:
        nonlocal num_done
        on_probe(name, num_done, num_probes)
        num_done += 1

    return [_measure(count, caches, tell) for count in counts]


def measure_ceilings(num_threads: int) -> Ceilings:
    """Measure the ceilings of so many threads now."""
    return measure_all([num_threads])[0]


def _measure(num_threads: int, caches: Iterable[Cache], tell: Callable[[str], None]) -> Ceilings:
    from paceline import _native

    num_cores = len(os.sched_getaffinity(0))
    peaks = {}
    for kind in ("int8", "bf16", "f32"):
        tell(f"{kind} multiply-adds, {num_threads} threads")
        peaks[kind] = float(_native.peak_macs(kind, num_threads, _SECONDS))
    reads = []
    for cache in caches:
        tell(f"reading {cache.level}, {num_threads} threads")
        capacity = cache.capacity(num_threads, num_cores)
        # Half of it: the rest of the program lives there too.
        half = max(capacity // 2, 4096 * num_threads)
        speed = float(_native.read_bandwidth(half, num_threads, _SECONDS / 3))
        reads.append(ReadSpeed(level=cache.level, capacity=capacity, bytes_s=speed))
    tell(f"reading memory, {num_threads} threads")
    speed = float(_native.read_bandwidth(_MEMORY_SET, num_threads, _SECONDS))
    return Ceilings(
        num_threads=num_threads,
        int8_macs_s=peaks["int8"],
        bf16_macs_s=peaks["bf16"] or None,
        f32_macs_s=peaks["f32"],
        reads=(*reads, ReadSpeed(level="memory", capacity=_MEMORY_SET, bytes_s=speed)),
    )


def read_caches(folder: Path = _CPU0) -> list[Cache]:
    """Return the data caches of the first core, the smallest first."""
    found = []
    for index in sorted(folder.glob("index*")):
        try:
            kind = (index / "type").read_text().strip()
            level = int((index / "level").read_text())
            size = (index / "size").read_text().strip()
            sharing = _count((index / "shared_cpu_list").read_text())
            num_bytes = int(size.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(size[-1], 1)
        except (OSError, ValueError, IndexError):
            continue
        if kind in ("Data", "Unified") and num_bytes > 0:
            found.append(Cache(level=f"L{level}", num_bytes=num_bytes, num_sharing=sharing))
    usual = [Cache(level=name, num_bytes=size, num_sharing=n) for name, size, n in _USUAL_CACHES]
    return sorted(found or usual, key=lambda cache: cache.num_bytes)


def _count(cpu_list: str) -> int:
    """Return how many CPUs "0-3,8" names."""
    total = 0
    for part in cpu_list.strip().split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total
