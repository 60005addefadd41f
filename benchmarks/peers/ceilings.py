"""What the machine itself reaches with all threads, measured beside the engines."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from floors import Ceilings

from paceline.errors import PacelineError
from paceline.measure.bandwidth import read_bandwidth

_BUSY_S = 0.2
_SOURCE = Path(__file__).parent.parent / "kernels" / "peak.cpp"
# The compiler's target for each ISA that Paceline may be held to: no wider peak than it could use.
_TARGETS = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=native", "-mno-avx512bf16"),
    "avx512bf16": ("-march=native",),
}


def compile_peak(isa: str, folder: Path) -> Path:
    """Return the program that measures the peaks of `isa`, built in `folder` with the system's g++.

    Raises PacelineError for an ISA it does not know, and where the compiler fails.
    """
    if isa not in _TARGETS:
        raise PacelineError(
            f"the ceilings of ISA {isa!r} cannot be measured: peak.cpp knows {', '.join(_TARGETS)}"
        )
    program = folder / "peak"
    flags = ["-O3", "-std=c++20", "-pthread", *_TARGETS[isa]]
    try:
        subprocess.run(
            ["g++", *flags, str(_SOURCE), "-o", str(program)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise PacelineError("g++ is missing: a C++ program measures the ceilings") from None
    except subprocess.CalledProcessError as error:
        raise PacelineError(f"g++ could not build {_SOURCE}: {error.stderr[:500]}") from None
    return program


def measure_ceilings(program: Path, num_threads: int) -> Ceilings:
    """Return the ceilings now (takes about half a second)."""
    done = subprocess.run(
        [str(program), str(num_threads)], check=True, capture_output=True, text=True
    )
    return parse_ceilings(done.stdout, read_bandwidth(num_threads))


def parse_ceilings(text: str, read_bytes_s: float) -> Ceilings:
    """Return the ceilings from what peak.cpp prints.

    Of the two readings of the bandwidth, the engine's own (several prefetched streams a thread) and
    the program's (one linear stream), the faster is the ceiling.
    """
    peak = json.loads(text)
    bf16 = peak["bf16_gmac_s"]
    return Ceilings(
        int8_macs_s=peak["gmac_s"] * 1e9,
        bf16_macs_s=None if bf16 is None else bf16 * 1e9,
        f32_macs_s=peak["f32_gmac_s"] * 1e9,
        read_bytes_s=max(read_bytes_s, peak["gb_s"] * 1e9),
    )


def busy_cores(before: str, after: str) -> float:
    """Return how many cores were busy on average between two readings of /proc/stat.

    Asked while all engines are stopped, it tells whether others use the machine.
    """
    first, last = (_ticks(text) for text in (before, after))
    total = sum(last) - sum(first)
    num_idle = sum(last[3:5]) - sum(first[3:5])  # idle, and waiting for a disk
    num_cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    return num_cores * (1 - num_idle / total) if total > 0 else 0.0


def _ticks(stat: str) -> list[int]:
    return [int(field) for field in stat.splitlines()[0].split()[1:9]]


def read_busy_cores() -> float:
    """Return `busy_cores` over a fifth of a second from now."""
    path = Path("/proc/stat")
    before = path.read_text()
    time.sleep(_BUSY_S)
    return busy_cores(before, path.read_text())


def chosen_isa() -> str:
    """Return the ISA that Paceline will run with here; PACELINE_ISA forces one."""
    from paceline import _native

    return os.environ.get("PACELINE_ISA") or str(_native.isas()[0])
