"""`paceline quantize` as a process: its memory, a kill half way, and the model that it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.weights.gguf import open_gguf
from tests.tiny import random_model, write_gguf, write_hf

COMMAND = (sys.executable, "-c", "from paceline.cli.main import main; main()", "quantize")
MB = 1 << 20
# Runs the command in a process of its own and prints the most memory that it ever held, in KiB.
WATCHED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
# Runs the command and prints for how many threads NumPy is told to multiply when it is imported.
NUMPY_THREADS = """
import os, sys
from paceline.cli.main import main
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("threads:", os.environ["OPENBLAS_NUM_THREADS"])
sys.meta_path.insert(0, Finder())
main()
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=600
    )


def peak_bytes(*arguments: object) -> int:
    watched = [sys.executable, "-c", WATCHED, *COMMAND, *map(str, arguments)]
    done = subprocess.run(watched, capture_output=True, text=True, check=True, timeout=600)
    code, kib = done.stdout.split()
    assert code == "0", done.stderr
    return int(kib) * 1024


def test_memory_is_bounded_whatever_the_model_takes(tmp_path: Path) -> None:
    """Two models: what the large one has more (96 MB, 192 MB as floats) takes no memory."""
    small = write_gguf(random_model(vocab_size=512, hidden=512), tmp_path / "s.gguf", fmt="f16")
    base = peak_bytes(small, "--format", "q8_0", "-o", tmp_path / "small.gguf")
    large_model = random_model(vocab_size=96 << 10, hidden=512, tie_word_embeddings=True)
    large = write_gguf(large_model, tmp_path / "l.gguf", fmt="f16")
    assert large.stat().st_size > 96 * MB
    peak = peak_bytes(large, "--format", "q8_0", "-o", tmp_path / "large.gguf")
    assert peak - base < 72 * MB
    assert open_gguf(tmp_path / "large.gguf").tensors["token_embd.weight"].format == "q8_0"


def test_memory_is_bounded_when_rows_change_their_order(tmp_path: Path) -> None:
    """The file of a folder has q and k in another order: here they have 64 MB, 128 MB as floats."""
    peaks = []
    for name, heads in (("small", 8), ("large", 1024)):
        model = random_model(hidden=512, layers=1, heads=heads, kv_heads=8, head_dim=64)
        folder = write_hf(model, tmp_path / name, fmt="bf16")
        peaks.append(peak_bytes(folder, "--format", "q8_0", "-o", tmp_path / f"{name}.gguf"))
    assert open_gguf(tmp_path / "large.gguf").tensors["blk.0.attn_q.weight"].shape == (1 << 16, 512)
    assert peaks[1] - peaks[0] < 48 * MB


@pytest.mark.parametrize("threads", [1, 2])
def test_matrix_products_have_the_threads_that_were_asked_for(tmp_path: Path, threads: int) -> None:
    model = write_gguf(random_model(), tmp_path / "m.gguf", fmt="f16")
    arguments = ["--format", "q8_0", "--threads", str(threads), "-o", str(tmp_path / "out.gguf")]
    done = subprocess.run(
        [sys.executable, "-c", NUMPY_THREADS, "quantize", str(model), *arguments],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    assert f"threads: {threads}" in done.stdout


def test_a_killed_process_is_continued_by_the_same_command(tmp_path: Path) -> None:
    model = random_model(vocab_size=80 << 10, hidden=1024, tie_word_embeddings=True)
    source = write_gguf(model, tmp_path / "m.gguf", fmt="f16")
    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    arguments = [source, "--format", "q8_0", "--json", "-o"]
    process = subprocess.Popen([*COMMAND, *map(str, [*arguments, out])])
    journal, data = tmp_path / "out.gguf.partial" / "progress.json", "out.gguf.partial/out.gguf"
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        is_noted = journal.exists() and json.loads(journal.read_bytes())["tensors"] > 0
        if is_noted and (tmp_path / data).exists():
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    if process.wait() == 0:
        pytest.skip("the process ended before it could be killed")
    assert not out.exists()
    facts = json.loads(run(*arguments, out).stdout)
    assert facts["resumed_tensors"] > 0
    run(*arguments, whole)
    assert out.read_bytes() == whole.read_bytes()


def test_the_written_folder_answers_and_is_described(tmp_path: Path) -> None:
    source = write_hf(random_model("qwen2", vocab_size=320), tmp_path / "m", fmt="bf16")
    done = run(source, "--format", "int4", "--asym", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "i4m_g64" in done.stdout
    assert "an error there reaches every token" in done.stdout
    from paceline import LLM, SamplingParams

    with LLM(str(tmp_path / "out")) as llm:
        params = SamplingParams(temperature=0, max_tokens=5)
        assert llm.generate(["ab"], params)[0].outputs[0].token_ids
    info = subprocess.run(
        [*COMMAND[:3], "info", str(tmp_path / "out"), "--json"], capture_output=True, check=True
    )
    assert "i4m_g64" in json.loads(info.stdout)["weight_bytes_by_format"]


def test_fp8_is_said_to_be_emulated_and_others_are_not(tmp_path: Path) -> None:
    source = write_hf(random_model(), tmp_path / "m")
    for fmt in ("fp8", "int8"):
        done = run(source, "--format", fmt, "-o", tmp_path / fmt)
        assert ("fp8 is emulated" in done.stdout) == (fmt == "fp8"), done.stderr


def test_bad_arguments_end_with_one_line_and_no_file(tmp_path: Path) -> None:
    source = write_gguf(random_model(), tmp_path / "m.gguf")
    for arguments, message in (
        (["--method", "awq"], "method awq rounds weights for a text"),
        (["--mixed", "5"], "mixed measures what rounding costs for a text"),
        (["--method", "gptq"], "method gptq rounds weights for a text"),
        (["--format", "int4", "--group", "100"], "group is '100'"),
        (["--format", "q4_k", "--group", "64"], "q4_k has groups of its own"),
    ):
        done = run(source, *arguments, "-o", tmp_path / "out")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"paceline: {message}")
    assert os.listdir(tmp_path) == ["m.gguf"]
