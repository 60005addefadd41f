from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from paceline.catalog import ENTRIES, home, installed, resolve, store
from paceline.cli.list import list_models
from paceline.errors import ModelNotFoundError, PullError


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def install(name: str) -> Path:
    """Place files of the right size, as by hand."""
    entry = next(entry for entry in ENTRIES if entry.name == name)
    for file in entry.files:
        path = store.folder_of(entry) / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            out.truncate(file.size)
    return store.model_path(entry)


def test_entries_are_complete_and_hashes_well_formed() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)
    for entry in ENTRIES:
        assert entry.description
        assert entry.license
        assert entry.wheels or entry.hub_repo
        for file in entry.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.size > 0
        for wheel in entry.wheels:
            assert re.fullmatch(r"[a-z0-9.-]+==[0-9.]+", wheel.requirement)


def test_only_models_with_terms_of_their_own_need_consent() -> None:
    assert [entry.name for entry in ENTRIES if entry.terms] == ["gemma3-270m"]
    with pytest.raises(PullError, match=r"terms: read https.*--accept-terms"):
        resolve("gemma3-270m")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PACELINE_HOME": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/paceline"),
        ({"HOME": "/h"}, "/h/.cache/paceline"),
    ],
)
def test_the_home_is_where_the_user_says(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PACELINE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert home() == Path(expected)


def test_an_installed_model_resolves_to_its_file_or_folder() -> None:
    file = install("smollm2-135m")
    folder = install("all-minilm-l6-v2")
    assert resolve("smollm2-135m") == resolve("SmolLM2-135M", pull=False) == file
    assert file.suffix == ".gguf"
    assert resolve("all-minilm-l6-v2") == folder
    assert folder.is_dir()
    assert [entry.name for entry, _ in installed()] == ["smollm2-135m", "all-minilm-l6-v2"]


def test_a_file_of_the_wrong_size_is_not_installed() -> None:
    path = install("smollm2-135m")
    path.write_bytes(b"cut")
    with pytest.raises(ModelNotFoundError, match="paceline pull smollm2-135m"):
        resolve("smollm2-135m", pull=False)


def test_paths_resolve_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path


def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'smolm2-135'.*did you mean smollm2-135m\?"):
        resolve("smolm2-135")
    with pytest.raises(ModelNotFoundError, match="The catalogue has smollm2-135m, "):
        resolve("zzz")
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve("./missing/model.gguf")


def test_a_hub_id_without_the_hub_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match=r"paceline\[hub\]"):
        resolve("org/name")


def test_a_hub_id_is_fetched_by_the_hub_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Hub:
        @staticmethod
        def snapshot_download(repo: str, **options: object) -> str:
            if repo == "org/gone":
                raise OSError("401 Client Error\nlong story")
            assert not options["local_files_only"]
            return str(tmp_path)

        @staticmethod
        def hf_hub_download(repo: str, file: str, **options: object) -> str:
            return str(tmp_path / repo / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert resolve("org/name") == tmp_path
    assert resolve("org/name/sub/m.gguf") == tmp_path / "org/name/sub/m.gguf"
    with pytest.raises(PullError, match=r"'org/gone'.*\(401 Client Error\)"):
        resolve("org/gone")


def test_list_shows_what_is_here() -> None:
    app = typer.Typer()
    app.command()(list_models)
    path = install("smollm2-135m")
    rows = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    assert {row["name"]: row["path"] for row in rows}["smollm2-135m"] == str(path)
    assert {row["name"]: row["path"] for row in rows}["gemma3-270m"] is None
    table = CliRunner().invoke(app, []).stdout
    assert re.search(r"smollm2-135m +98 MB +Apache-2.0 +yes", table)
