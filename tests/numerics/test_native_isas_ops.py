"""Kernels over f32x16 for ISAs that this machine lacks, emulated: equal bits to the scalar ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ("rms_norm", "rope_store", "attend", "gated_act", "layer_norm", "elementwise")
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'native'}"]
SIMDE = [
    "-mavx2", "-mfma", "-mf16c", "-DPACELINE_SIMDE",
    "-include", str(ROOT / "tests/native/simde_missing.h"),
]  # fmt: skip
NEON = ["-march=armv8.2-a+dotprod+fp16"]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def build(compiler, isa, isa_flags, folder):
    """ops_check.cpp with the scalar kernels and those of `isa`."""
    objects = [str(folder / f"{isa}_check.o")]
    check = str(ROOT / "tests/native/ops_check.cpp")
    run(compiler, *FLAGS, f"-DPL_CHECK_ISA={isa}", "-c", check, "-o", objects[0])
    for name, flags in (("scalar", []), (isa, isa_flags)):
        defines = [f"-DPL_ISA={name}", f"-DPL_ISA_{name}=1"]
        for kernel in KERNELS:
            objects.append(str(folder / f"{isa}_{name}_{kernel}.o"))
            source = str(ROOT / f"native/kernels/{kernel}.cpp")
            run(compiler, *FLAGS, *defines, *flags, "-c", source, "-o", objects[-1])
    program = str(folder / f"{isa}_ops_check")
    run(compiler, *objects, "-static", "-o", program)
    return program


def test_avx512_kernels_equal_scalar_ones_under_simde(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    if not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("libsimde-dev is not installed")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("SIMDe's emulation is built on AVX2, which this CPU lacks")
    assert " 0 differences" in run(build("g++", "avx512", SIMDE, tmp_path))


def test_neon_kernels_equal_scalar_ones_under_qemu(tmp_path):
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("g++-aarch64-linux-gnu is not installed")
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("qemu-user is not installed")
    program = build("aarch64-linux-gnu-g++", "neon", NEON, tmp_path)
    assert " 0 differences" in run("qemu-aarch64", program)


@pytest.mark.parametrize(
    ("cpu", "isas"), [("Nehalem", ["scalar"]), ("Haswell", ["avx2", "scalar"])]
)
def test_an_older_cpu_gets_older_kernels(cpu, isas):
    """Case CPU-02: no illegal instruction at import, and only what the CPU can run is offered."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("emulates x86-64 on x86-64")
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-user is not installed")
    code = "from paceline import _native; print(_native.isas(), _native.active_isa())"
    done = run("qemu-x86_64", "-cpu", cpu, sys.executable, "-c", code)
    assert done.strip() == f"{isas} {isas[0]}"
