"""`paceline eval` as a process and in this one: figures, a kill half way, and what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import EngineConfig
from paceline.errors import PacelineError
from paceline.evaluate.run import Evaluation, Source, Work
from paceline.evaluate.state import State
from paceline.measure.quality import limits_for, perplexity
from tests.conftest import reference_logits
from tests.e2e.live import TOKENIZER
from tests.tiny import context_free_model, random_model, write_gguf

COMMAND = (sys.executable, "-c", "from paceline.cli.main import main; main()", "eval")
WORDS = "hello world one two three the cat sat, and the end of the cat is not the end. "


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(random_model(vocab_size=320), tmp_path_factory.mktemp("m") / "m.gguf")


def evaluate(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json"])
    if result.exception is not None:
        raise result.exception
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def lines(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_perplexity_is_that_of_the_windows_and_equal_models_differ_in_nothing(
    model: Path, tmp_path: Path
) -> None:
    from paceline.backends.reference import ReferenceBackend
    from paceline.models.base import build_plan
    from paceline.text.tokenizer import build_tokenizer
    from paceline.weights.checkpoint import open_checkpoint

    text = tmp_path / "t.txt"
    text.write_text(WORDS * 6)
    options = ("--context", 32, "--stride", 8, "--kv-dtype", "f32")
    facts = evaluate(model, "--text", text, *options, "--against", model)["text"]
    checkpoint = open_checkpoint(model)
    ids = build_tokenizer(checkpoint.tokenizer).encode(WORDS * 6)
    kv, limits = limits_for(32, block_size=16)
    backend = ReferenceBackend()
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    expected = perplexity(backend, ids, kv=kv, limits=limits, context=32, stride=8)
    assert facts["num_scored"] == expected.num_tokens == len(ids) - 1
    assert facts["perplexity"]["value"] == pytest.approx(expected.value, rel=1e-3)
    assert facts["perplexity"]["low"] < expected.value < facts["perplexity"]["high"]
    assert (facts["kl_mean"]["value"], facts["kl_max"]) == (0, 0)
    assert (facts["top1"]["value"], facts["top5"]["value"]) == (1, 1)
    assert facts["perplexity_ratio"] == {"value": 1, "low": 1, "high": 1}


def test_a_coarser_kv_format_shows_in_kl(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(WORDS * 6)
    options = ("--text", text, "--context", 32, "--against-kv-dtype", "f32")
    means = {
        kv: evaluate(model, *options, "--kv-dtype", kv)["text"]["kl_mean"]["value"]
        for kv in ("f16", "int8", "fp8", "k8v4", "int4")
    }
    assert 0 < means["f16"] < means["int8"] < means["fp8"]
    assert means["int8"] < means["k8v4"] < means["int4"]


def test_the_begin_token_stands_before_every_window(tmp_path: Path) -> None:
    from dataclasses import replace

    from paceline.text.tokenizer import build_tokenizer
    from paceline.weights.checkpoint import open_checkpoint

    tokenizer = replace(TOKENIZER, add_bos=True)
    path = write_gguf(random_model(tokenizer=tokenizer), tmp_path / "m.gguf")
    text = tmp_path / "t.txt"
    text.write_text("abcdefghijk")
    facts = evaluate(path, "--text", text, "--context", 8, "--stride", 3, "--kv-dtype", "f32")
    checkpoint = open_checkpoint(path)
    ids = build_tokenizer(checkpoint.tokenizer).encode("abcdefghijk")
    loss = 0.0
    for start, stop, first in ((1, 8, 2), (4, 11, 8), (7, 12, 11)):
        window = [ids[0], *ids[start:stop]]
        logits = reference_logits(checkpoint, window)
        for at in range(first, stop):
            row = logits[at - start].astype(float)
            loss += math.log(sum(math.exp(x) for x in row)) - row[ids[at]]
    value = facts["text"]["perplexity"]["value"]
    assert facts["text"]["num_scored"] == 10
    assert value == pytest.approx(math.exp(loss / 10), rel=1e-3)


def test_a_killed_run_goes_on_and_ends_with_the_same_figures(
    model: Path, tmp_path: Path, own_home: Path
) -> None:
    text = tmp_path / "t.txt"
    text.write_text(WORDS * 400)
    arguments = [str(model), "--text", str(text), "--context", "64", "--json"]
    arguments += ["--kv-dtype", "int8", "--against-kv-dtype", "f32"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        states = list(own_home.glob("evaluations/*.jsonl"))
        if states and states[0].read_bytes().count(b"\n") > 3:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    if process.wait() == 0:
        pytest.skip("the process ended before it could be killed")
    resumed = evaluate(*arguments[:-5], *arguments[-4:], "--threads", 1)
    assert resumed.pop("resumed_items") > 2
    whole = evaluate(*arguments[:-5], *arguments[-4:])
    assert whole.pop("resumed_items") == 0
    assert resumed == whole
    assert list(own_home.glob("evaluations/*")) == []


def test_choices_are_scored_by_their_letters_and_by_length(tmp_path: Path) -> None:
    """Each "a" costs 1 nat and each "b" 3, so "aaaaa" loses to "b" as a sum and wins by length."""
    ids = TOKENIZER.byte_ids
    logits = {token_id: -8.0 for token_id in ids(" ")}
    logits |= {ids("a")[0]: math.log(math.exp(-1)), ids("b")[0]: math.log(math.exp(-3))}
    logits |= {ids("z")[0]: math.log(1 - math.exp(-1) - math.exp(-3))}
    path = write_gguf(context_free_model(logits, tokenizer=TOKENIZER), tmp_path / "m.gguf")
    item = {"question": "q", "choices": ["aaaaa", "b"]}
    file = lines(tmp_path / "t.jsonl", {**item, "answer": 1}, {**item, "answer": "A"})
    found = evaluate(path, "--tasks", file)["generation"]["model"]["tasks"][str(file)]["choices"]
    assert found["num_items"] == 2
    shares = found["accuracy"]["value"], found["accuracy_normalised"]["value"]
    assert shares == (0.5, 0.5)
    alone = lines(tmp_path / "one.jsonl", {**item, "answer": 1})
    found = evaluate(path, "--tasks", alone)["generation"]["model"]["tasks"][str(alone)]["choices"]
    assert found["accuracy"]["value"] == 1
    assert found["accuracy_normalised"]["value"] == 0


def test_greedy_answers_are_marked_and_loops_counted(script_path: Path, tmp_path: Path) -> None:
    """The scripted model counts 0123456789 for ever after a digit, and ends after z."""
    tasks = lines(
        tmp_path / "t.jsonl",
        {"question": "0", "answer": "123456789"},
        {"question": "?", "answer": "#### 77"},
    )
    prompts = lines(tmp_path / "p.jsonl", {"prompt": "0"}, {"prompt": "a"})
    facts = evaluate(
        script_path, "--raw", "--prompts", prompts, "--tasks", tasks, "--max-tokens", 64
    )["generation"]["model"]
    loops = facts["prompts"]["loops"]
    assert (loops["num_answers"], loops["num_loops"], loops["num_cut"]) == (2, 1, 1)
    assert facts["tasks"][str(tasks)]["numbers"]["num_items"] == 2


def test_answers_that_the_state_knows_are_not_asked_for_again(
    script_path: Path, tmp_path: Path
) -> None:
    """The state is given an answer that the model would never give, and it counts."""
    prompts = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    arguments = (script_path, "--raw", "--prompts", prompts, "--state", tmp_path / "state")
    source = Source(role="model", model=str(script_path), path=script_path, config=EngineConfig())
    evaluation = Evaluation([source], Work(prompts=("a", "b"), is_chat=False))
    with State(tmp_path / "state", evaluation.identity) as state:
        state.put("model prompt 1", {"text": "", "num_tokens": 99, "is_cut": True, "loop": 3})
    facts = evaluate(*arguments)
    assert facts["resumed_items"] == 1
    assert facts["generation"]["model"]["prompts"]["loops"]["num_loops"] == 1
    again = evaluate(*arguments)
    assert again["resumed_items"] == 0
    assert again["generation"]["model"]["prompts"]["loops"]["num_loops"] == 0


def test_humaneval_runs_programs_only_when_it_may(script_path: Path, tmp_path: Path) -> None:
    problem = {"prompt": "x = 'a", "entry_point": "str", "test": "'\ndef check(f): assert x > ''"}
    file = lines(tmp_path / "h.jsonl", problem)
    with pytest.raises(PacelineError, match="--allow-code-execution"):
        evaluate(script_path, "--humaneval", "--humaneval-file", file)
    result = CliRunner().invoke(
        app,
        ["eval", str(script_path), "--humaneval", "--humaneval-file", str(file), "--raw",
         "--allow-code-execution", "--json"],
    )  # fmt: skip
    assert "runs programs that the model wrote" in result.stderr
    found = json.loads(result.stdout)["generation"]["model"]["humaneval"]
    assert found["num_items"] == 1
    assert found["pass_at_1"]["value"] == 0
    assert found["failures"] == {"SyntaxError": 1}


def test_needles_keep_to_their_length_for_model_and_reference(
    long_script_path: Path, tmp_path: Path
) -> None:
    facts = evaluate(
        long_script_path, "--needle", "700,1200", "--depths", "0,100", "--against-kv-dtype", "f32"
    )["generation"]
    cells = facts["model"]["needles"]["cells"]
    assert [(c["length"], c["depth"]) for c in cells] == [
        (700, 0), (700, 100), (1200, 0), (1200, 100),
    ]  # fmt: skip
    assert all(c["length"] - 100 < c["num_tokens"] <= c["length"] for c in cells)
    assert facts["reference"]["needles"] == facts["model"]["needles"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing is asked"),
        (["--text", "none.txt"], "none.txt cannot be read"),
        (["--needle", "10"], "the needle and its question alone"),
        (["--needle", "99,500"], "--needle is 500: beside an answer of 32 tokens .* 512 holds 480"),
        (["--tasks", "a.jsonl", "--tasks", "a.jsonl"], "names a file twice"),
        (["--allow-code-execution"], "need --humaneval"),
        (["--needle", "900", "--stride", "4"], "--stride means nothing"),
        (["--text", "t", "--speculate", "ngram"], "--speculate means nothing"),
        (["--needle", "900", "--depths", "101"], "--depths"),
        (["--needle", "900", "--against-kv-dtype", "int5"], "--against-kv-dtype is 'int5': choose"),
        (["--needle", "900", "--against-activations", "q4"], "--against-activations is 'q4': ch"),
    ],
)
def test_what_cannot_be_is_refused(model: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        evaluate(model, *arguments)


def test_a_reference_of_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_gguf(random_model(vocab_size=352), tmp_path / "o.gguf")
    text = tmp_path / "t.txt"
    text.write_text(WORDS)
    with pytest.raises(PacelineError, match=r"different vocabularies \(320 and 352 tokens\)"):
        evaluate(model, "--text", text, "--context", 32, "--against", other)


def test_the_terminal_shows_the_figures_with_their_intervals(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(WORDS * 6)
    arguments = ["eval", str(model), "--text", str(text), "--context", "32"]
    result = CliRunner().invoke(app, [*arguments, "--against-kv-dtype", "f32", "--limit", "2"])
    assert result.exit_code == 0, result.output
    for words in ("windows of 32 that move by 16", "KL, p99", "same best token", " to "):
        assert words in result.stdout
