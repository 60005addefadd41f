"""The kernels of ISAs that this machine lacks, emulated: equal bits to the scalar kernels."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
KERNELS = ("quantize", "encode", "linear", "embed")
FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", f"-I{NATIVE}"]
SIMDE_FLAGS = [
    "-O0", "-mavx2", "-mfma", "-mf16c", "-DPACELINE_SIMDE",
    "-include", str(ROOT / "tests/native/simde_missing.h"),
]  # fmt: skip
NEON_FLAGS = ["-O1", "-march=armv8.2-a+dotprod+fp16"]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def build(compiler: str, isa: str, isa_flags: list[str], folder: Path) -> Path:
    """Build linear_check.cpp with the scalar kernels and those of `isa`; objects are shared."""

    def compile_to(name: str, source: Path, flags: list[str]) -> str:
        out = folder / f"{Path(compiler).name}_{name}.o"
        if not out.exists():
            run([compiler, *FLAGS, *flags, "-c", str(source), "-o", str(out)])
        return str(out)

    jobs = [("pack", NATIVE / "pack.cpp", [])]
    check = ROOT / "tests/native/linear_check.cpp"
    jobs.append((f"{isa}_check", check, [f"-DPL_CHECK_ISA={isa}"]))
    for name, flags in (("scalar", ["-O1"]), (isa, isa_flags)):
        defines = [f"-DPL_ISA={name}", f"-DPL_ISA_{name}=1"]
        for kernel in KERNELS:
            source = NATIVE / f"kernels/{kernel}.cpp"
            jobs.append((f"{name}_{kernel}", source, [*defines, *flags]))
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: compile_to(*job), jobs))
    program = folder / f"{isa}_linear_check"
    run([compiler, *objects, "-static", "-o", str(program)])
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.mark.parametrize("isa", ["avx512", "avx512bf16"])
def test_avx512_kernels_equal_scalar_ones_under_simde(isa: str, folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    if not Path("/usr/include/simde/x86/avx512.h").exists():
        pytest.skip("libsimde-dev is not installed")
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("SIMDe's emulation is built on AVX2, which this CPU lacks")
    assert "0 differences" in run([str(build(compiler, isa, SIMDE_FLAGS, folder))])


def test_neon_kernels_equal_scalar_ones_under_qemu(folder: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None:
        pytest.skip("g++-aarch64-linux-gnu is not installed")
    if emulator is None:
        pytest.skip("qemu-user is not installed")
    assert "0 differences" in run([emulator, str(build(compiler, "neon", NEON_FLAGS, folder))])
