"""Misuse of the command line and of LLM: a clear word, and no harm to others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.config import EngineConfig
from paceline.errors import (
    BackendError,
    ModelFormatError,
    ModelNotFoundError,
    PacelineError,
    ParameterError,
)
from paceline.weights.repack import pack_all
from tests.e2e.live import ALPHABET
from tests.tiny import random_blocks, random_model, write_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=25)
COMMAND = "from paceline.cli.main import main; main()"


def shell(line: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the shell line `line`, in which "$@" is paceline with `arguments`."""
    command = ["sh", "-c", line, "sh", sys.executable, "-c", COMMAND, *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


@pytest.fixture(scope="module")
def llm(script_path: Path):
    with LLM(script_path, kv_memory_bytes=2**20, num_threads=2) as model:
        yield model


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16"])
def test_a_nan_weight_is_reported_at_load_and_ends_only_the_requests_that_meet_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fmt: str
):
    name = "model.embed_tokens.weight"
    good = random_model(seed=3)
    rows = good.tensors[name].copy()
    rows[ord("!")] = np.nan
    paths = {
        kind: write_gguf(model, tmp_path / f"{kind}.gguf", fmt=fmt)
        for kind, model in (("good", good), ("broken", good.with_tensor(name, rows)))
    }
    # "!" is never chosen, as its row would poison the next step.
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, logit_bias={ord("!"): -100})
    with LLM(paths["good"], kv_memory_bytes=2**20) as model:
        want = model.generate("abc", params)[0].outputs[0]
    assert "infinity" not in caplog.text
    with LLM(paths["broken"], kv_memory_bytes=2**20) as model:
        assert f"NaN or infinity in the weights {name}:" in caplog.text
        with pytest.raises(BackendError, match="not finite"):
            model.generate(["a!c", "abc"], params)
        got = model.generate("abc", params)[0].outputs[0]
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
        assert model.loaded.engine.stats().num_live_blocks == 0


def test_a_nan_in_a_norm_is_reported_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    name = "model.norm.weight"
    model = random_model()
    path = write_gguf(model.with_tensor(name, model.tensors[name] * np.nan), tmp_path / "m.gguf")
    LLM(path, kv_memory_bytes=2**20).close()
    assert f"NaN or infinity in the weights {name}" in caplog.text


def run_arguments(path: Path, prompt: str = "a") -> tuple[str, ...]:
    return ("run", str(path), prompt, "--raw", "-n", "3", "--temperature", "0", "--threads", "1")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_streams_are_no_failure(script_path: Path, closed: str):
    result = shell(f'"$@" {closed}', *run_arguments(script_path))
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)


def test_a_full_disk_behind_stdout_is_one_line(script_path: Path):
    result = shell('"$@" >/dev/full', *run_arguments(script_path))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "No space left" in result.stderr


def test_a_character_that_the_terminal_lacks_shows_as_a_question_mark(script_path: Path):
    arguments = (*run_arguments(script_path, "#"), "-n", "8")
    result = shell('"$@"', *arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert (result.returncode, result.stdout) == (0, "??$\n")


@pytest.mark.parametrize("model", ["x" * 5000, "~no-such-user/model.gguf"])
def test_a_name_that_cannot_be_a_path_is_not_found(model: str):
    with pytest.raises(ModelNotFoundError, match="cannot read"):
        LLM(model)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "model.gguf")
    for path in (tmp_path / "model.gguf", Path("/dev/zero"), Path("/proc/cpuinfo")):
        with pytest.raises(PacelineError, match=r"no regular file|cannot be mapped"):
            LLM(path)


def test_a_window_beyond_the_kernels_integers_is_named(tmp_path: Path):
    key = "llama.attention.sliding_window"
    path = write_gguf(random_model(), tmp_path / "m.gguf", overrides={key: 2**31})
    with pytest.raises(ModelFormatError, match=key):
        LLM(path)


def test_the_packed_cache_is_for_all_whom_the_umask_allows(tmp_path: Path):
    tensor = random_blocks(np.random.default_rng(0), "q8_0", (16, 32))
    cache = tmp_path / "m.packed"
    pack_all({"w": tensor}, ["w"], cache_path=cache, num_threads=1)
    other = tmp_path / "other"
    other.touch()
    assert cache.stat().st_mode == other.stat().st_mode
    assert not list(tmp_path.glob("*.tmp"))


def test_an_empty_template_does_not_fall_back_to_the_models_own(script_path: Path):
    with pytest.raises(ParameterError, match="no chat template"):
        LLM(script_path, chat_template="")


@pytest.mark.parametrize(
    "options",
    [{"max_batched_tokens": 10**20}, {"max_num_seqs": 10**9}, {"seed": "x"}, {"policy": None}],
)
def test_absurd_engine_options_are_named(options: dict[str, Any]):
    with pytest.raises(ParameterError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "field",
    [
        {"stop": "abc"}, {"bad_words": "abc"}, {"stop_token_ids": 5}, {"logit_bias": 5},
        {"stop": ("x" * 1025,)}, {"temperature": 10**400}, {"top_p": -(10**400)},
    ],
)  # fmt: skip
def test_absurd_sampling_options_are_named(field: dict[str, Any]):
    with pytest.raises(ParameterError, match=next(iter(field))):
        SamplingParams(**field)


@pytest.mark.parametrize("prompt", [[1.5], ["a", 5], [[97, "x"]], [[[1]]]])
def test_a_prompt_of_other_things_than_ids_is_refused(llm: LLM, prompt: Any):
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(prompt, GREEDY)


def test_ids_from_numpy_are_ids(llm: LLM):
    for prompt in (np.array([97, 98]), [np.array([97, 98])]):
        answer = llm.generate(prompt, GREEDY)[0]
        assert (answer.text, type(answer.prompt_token_ids[0])) == (ALPHABET[2:], int)


def test_params_of_another_type_are_refused(llm: LLM):
    with pytest.raises(ParameterError, match="params"):
        llm.generate("a", {"temperature": 0})


def test_threads_that_share_an_llm_do_not_mix_their_steps(llm: LLM):
    texts: list[str] = []

    def generate() -> None:
        for _ in range(5):
            texts.append(llm.generate("a", GREEDY, progress=False)[0].text)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [ALPHABET[1:]] * 20
