"""`paceline price` with its real processes, on a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import PacelineError, ParameterError
from tests.tiny import random_model, write_hf

WORDS = "hello world one two three the cat sat, and the end of the cat is not the end. "
FAST = ("--context", 32, "--windows", 2, "--batch", "1,2", "--input", 8, "--output", 4,
        "--rounds", 1, "--threads", 1)  # fmt: skip


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(random_model("qwen2", vocab_size=320), tmp_path / "m", fmt="bf16")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "t.txt"
    path.write_text(WORDS * 4)
    return path


def price(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["price", *map(str, arguments), "--json"])
    if result.exception is not None:
        raise result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_each_candidate_has_its_size_speed_and_quality(
    model: Path, text: Path, tmp_path: Path, own_home: Path
) -> None:
    keep, svg = tmp_path / "keep", tmp_path / "p.svg"
    asked = (model, "--text", text, "--kv", "f16", "--keep", keep, *FAST)
    document = price(*asked, "--weights", "source,int4:64", "--svg", svg)
    source, int4 = document["candidates"]
    assert int4["disk_bytes"] < source["disk_bytes"]
    assert int4["memory"]["weight_bytes"] < source["memory"]["weight_bytes"]
    assert source["memory"]["resident_bytes"]["median"] > source["memory"]["weight_bytes"]
    assert source["text"]["kl_mean"]["value"] < 1e-4 < int4["text"]["kl_mean"]["value"]
    assert [batch["batch"] for batch in int4["speed"]] == [1, 2]
    assert all(batch["prefill_tokens_per_s"]["median"] > 0 for batch in int4["speed"])
    assert "memory" in source["fronts"]
    assert svg.read_text().startswith("<svg")
    assert not (own_home / "prices").exists()

    (state,) = keep.glob("price-*.jsonl")
    known = state.read_bytes()
    (made,) = (keep / "models").glob("int4-64-*")
    again = price(*asked, "--weights", f"source,int4:64,{made}")
    for before, after in zip((source, int4), again["candidates"], strict=False):
        assert after == {**before, "fronts": after["fronts"]}
    assert again["candidates"][2]["text"]["kl_mean"] == int4["text"]["kl_mean"]
    assert state.read_bytes().startswith(known)
    assert os.listdir(keep / "models") == [made.name]


def test_without_keep_nothing_is_left_and_quality_may_be_left_out(
    model: Path, own_home: Path
) -> None:
    document = price(model, "--no-quality", "--weights", "int8:64", "--kv", "int8", *FAST)
    (row,) = document["candidates"]
    assert (row["name"], row["text"], row["fronts"]) == ("int8:64, KV int8", None, [])
    assert os.listdir(own_home / "prices") == []


def test_a_process_that_fails_is_named_with_its_reason(
    model: Path, text: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(WORDS)
    asked = ("--weights", "gptq/int4:64", "--calibrate", other, "--text", text, *FAST)
    with pytest.raises(PacelineError, match=r"making gptq/int4:64: .* has 34 tokens"):
        price(model, *asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a price needs a quality: give --text FILE"),
        (("--no-quality", "--text", "TEXT"), "--no-quality leaves out --text"),
        (("--no-quality", "--svg", "p.svg"), "--svg draws prices over KL"),
        (("--text", "TEXT", "--svg", "/nowhere/p.svg"), "there is no folder /nowhere"),
        (("--text", "TEXT", "--calibrate", "TEXT"), "fitted to the text that they are measured"),
        (("--text", "TEXT", "--weights", "gptq/int4"), "gptq/int4 is fitted to a text"),
        (
            ("--text", "TEXT", "--weights", "int4", "--calibrate", "OTHER"),
            "read by no candidate",
        ),
        (("--text", "TEXT", "--kv", "int3"), "KV format is 'int3'"),
        (("--text", "TEXT", "--batch", "0"), "--batch"),
        (("--text", "TEXT", "--problems", "3"), "--problems needs --humaneval"),
        (("--text", "TEXT", "--humaneval"), "add --allow-code-execution"),
        (("--text", "TEXT", "--activations", "q4"), "--activations is 'q4'"),
        (("--text", "/nowhere.txt"), "/nowhere.txt cannot be read"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(
    model: Path, text: Path, own_home: Path, arguments: tuple[str, ...], message: str
) -> None:
    other = text.with_name("other.txt")
    other.write_text(WORDS)
    names = {"TEXT": str(text), "OTHER": str(other)}
    with pytest.raises(ParameterError, match=message):
        price(model, *(names.get(part, part) for part in arguments))
    assert not own_home.exists()
