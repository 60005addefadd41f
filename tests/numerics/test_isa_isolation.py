"""Case CPU-02: code of one instruction set never leaks to a CPU without it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "native" / "kernels").glob("*.cpp"))
FLAGS = [
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
]

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 flags"),
    pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="needs g++ and nm"),
]


@pytest.mark.parametrize("source", KERNELS, ids=lambda p: p.name)
def test_a_kernel_file_defines_nothing_outside_its_own_namespace(
    source: Path, tmp_path: Path
) -> None:
    # A weak symbol (an inline function or template of a library) could be kept from this object by
    # the linker and then run on a CPU that lacks AVX-512. -O0 inlines least, so it shows them all.
    obj = tmp_path / "kernel.o"
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-fno-exceptions",
        *FLAGS,
        "-DPL_ISA=avx512",
        "-DPL_ISA_avx512=1",
        "-ffp-contract=off",
    ]
    subprocess.run(
        [
            *command,
            "-fvisibility=hidden",
            "-I",
            str(ROOT / "native"),
            "-c",
            str(source),
            "-o",
            str(obj),
        ],
        check=True,
    )
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", str(obj)], capture_output=True, text=True, check=True
    )
    shared = []
    for line in listing.stdout.splitlines():
        kind, name = line.split(maxsplit=2)[1:]
        if kind in "TDBRVWuw" and "paceline::avx512::" not in name:
            shared.append(line)
    assert not shared, "symbols that another object could replace or be replaced by"
