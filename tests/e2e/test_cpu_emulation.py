"""Case CPU-02: the installed package on CPUs without AVX-512 or AVX2, under qemu's emulation."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import random_model, write_gguf

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 CPUs"),
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian: qemu-user)"),
]


def _run(cpu: str | None, *args: str) -> subprocess.CompletedProcess[str]:
    prefix = [] if cpu is None else [str(QEMU), "-cpu", cpu]
    return subprocess.run(
        [*prefix, sys.executable, "-m", "paceline", *args],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("cpu", "isa"), [("Haswell", "avx2"), ("SandyBridge", "scalar"), ("Nehalem", "scalar")]
)
@pytest.mark.parametrize("weights", ["q4_1", "q8_0", "bf16"])
def test_an_older_cpu_gives_the_same_text_without_an_illegal_instruction(
    cpu: str, isa: str, weights: str, tmp_path: Path
) -> None:
    model = write_gguf(random_model(), tmp_path / "tiny.gguf", fmt=weights)
    ask = ["run", str(model), "hello", "--raw", "-n", "20", "--temperature", "0", "--json",
           "--kv-dtype", "f16"]  # fmt: skip
    here, there = _run(None, *ask), _run(cpu, *ask)
    assert there.returncode == 0, there.stderr  # 132 or -4 would be an illegal instruction
    assert json.loads(there.stdout)["isa"] == isa
    # bf16 weights on an AVX-512 BF16 machine round activations; everywhere else the bits are equal.
    if not (weights == "bf16" and json.loads(here.stdout)["isa"] == "avx512bf16"):
        assert json.loads(there.stdout)["text"] == json.loads(here.stdout)["text"]


def test_version_works_on_an_old_cpu() -> None:
    assert _run("Nehalem", "--version").returncode == 0
