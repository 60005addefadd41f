"""Servers that the bench starts end with it, however it ends."""

import signal

import pytest

from paceline.bench.servers import ServerStartError, Settings, running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_unwinds_the_block_that_holds_the_servers(tmp_path, number):
    before = signal.getsignal(number)
    with (
        pytest.raises(SystemExit) as found,
        running([], Settings(model=tmp_path, num_threads=1)),
    ):
        signal.raise_signal(number)
    assert found.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_a_hang_up_that_nohup_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running([], Settings(model=tmp_path, num_threads=1)):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_who_waits_is_told_which_server_starts(tmp_path):
    settings = Settings(model=tmp_path / "none.gguf", num_threads=1)
    told = []
    with (
        pytest.raises(ServerStartError, match="paceline did not start"),
        running(["paceline", "llama.cpp"], settings, on_start=told.append),
    ):
        pass
    assert told == ["paceline"]
