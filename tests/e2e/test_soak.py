"""The short form of the soak: the same storm, without the bound on the canary's gaps."""

import http.client
import socket
import threading

import pytest

from tests.e2e.live import ServeProcess, script_model
from tests.e2e.soak import allow_files, soak
from tests.e2e.soak_canary import ask
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


def connection_to(listener, replies):
    """Serve a connection after the other: each answers so many calls, and is closed unasked."""

    def serve():
        for num_calls in replies:
            peer, _ = listener.accept()
            with peer:
                for _ in range(num_calls):
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    threading.Thread(target=serve, daemon=True).start()
    return http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=30)


def test_the_canary_lives_when_a_connection_that_it_kept_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = connection_to(listener, (1, 2))
        assert [ask(connection, b"{}").read() for _ in range(3)] == [b"ok"] * 3
        connection.close()


def test_the_canary_dies_of_a_new_connection_that_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = connection_to(listener, (0,))
        with pytest.raises(ConnectionError):
            ask(connection, b"{}")
        connection.close()
