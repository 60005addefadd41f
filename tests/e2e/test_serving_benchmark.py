"""`benchmarks/serving.py`: its table, and that a run which was stopped goes on."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fake_server import FakeServer, steady

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import serving  # noqa: E402

sys.path.remove(str(FOLDER))


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Return a function that runs the script on two scripted servers."""
    monkeypatch.setitem(
        serving.WORKLOADS, "chat", ("synthetic:input=4,output=2", ["ttft=800ms,tpot=500ms"])
    )
    model = tmp_path / "m.gguf"
    model.touch()
    path = tmp_path / "report.json"

    def run(*arguments: str) -> int:
        """Return how many requests the first server got."""
        with (
            FakeServer(lambda number, body: steady(ttft_ms=5, gap_ms=1, tokens=2)) as fast,
            FakeServer(lambda number, body: steady(ttft_ms=900, gap_ms=1, tokens=2)) as slow,
        ):

            @contextmanager
            def up(names, settings):
                assert names == ["paceline", "openvino"]
                yield [("paceline", fast.url), ("openvino", slow.url)]

            monkeypatch.setattr(serving, "running", up)
            serving.main([str(model), "--peer", "openvino", "--workloads", "chat", "--rates",
                          "20,40", "--duration", "400ms", "--warmup", "0", "--rounds", "1",
                          "--threads", "1", "--json", str(path), *arguments])  # fmt: skip
        return len(fast.served)

    return run, path


def test_a_cell_that_is_there_is_not_run_again_and_one_that_is_missing_is(begin, capsys):
    run, path = begin
    assert run() > 10
    shown = capsys.readouterr().out
    assert run() == 0
    assert capsys.readouterr().out == shown
    report = json.loads(path.read_text())
    assert list(report["cells"]) == ["chat, 20/s", "chat, 40/s"]
    kept = report["cells"]["chat, 20/s"]
    del report["cells"]["chat, 40/s"]
    path.write_text(json.dumps(report))
    assert run() > 5
    again = json.loads(path.read_text())["cells"]
    assert again["chat, 20/s"] == kept
    assert "chat, 40/s" in again


def test_the_table_shows_a_row_a_cell_and_server_with_what_missed(begin, capsys):
    run, _ = begin
    run()
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines if "| chat" in line]
    assert [row[:3] for row in rows] == [
        ["chat", "20", "paceline"], ["chat", "20", "openvino"],
        ["chat", "40", "paceline"], ["chat", "40", "openvino"],
    ]  # fmt: skip
    assert all(len(row) == serving.HEAD.count("|") - 1 for row in rows)
    for row in rows:
        met, num = row[8].split(" (")[0].split(" of ")
        assert int(num) > 2
        assert int(met) == (0 if row[2] == "openvino" else int(num))
        assert row[9:] == ["0", "0"]
    assert any(line.startswith("paceline bench --serve") for line in lines)


def test_a_file_of_another_run_is_not_gone_on_with(begin):
    run, path = begin
    path.write_text(json.dumps({"about": {"model": "other.gguf"}, "cells": {}}))
    with pytest.raises(SystemExit, match="another run"):
        run()
