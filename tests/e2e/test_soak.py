"""The short form of the soak: the same storm, without the bound on the canary's gaps."""

import pytest

from tests.e2e.live import ServeProcess, script_model
from tests.e2e.soak import allow_files, soak
from tests.e2e.soak_moves import MOVES


@pytest.fixture(scope="module")
def stormy(tmp_path_factory):
    allow_files(4096)
    path = script_model(tmp_path_factory.mktemp("soak"), max_context=2048)
    with ServeProcess(path, "--kv-memory", "4M", "--max-num-seqs", "16") as server:
        yield server


def test_a_storm_changes_no_answer_and_leaves_nothing_behind(stormy):
    song = {"model": stormy.name, "prompt": "0123", "temperature": 0, "max_tokens": 120,
            "ignore_eos": True}  # fmt: skip
    report = soak(stormy, seconds=12, seed=7, num_clients=8, song=song, is_script=True)
    assert report.failures == []
    assert report.moves.keys() == {move.__name__ for move in MOVES} | {"burst"}
    assert report.num_songs > 0
    stormy.survive()
