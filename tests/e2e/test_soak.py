"""The short form of the soak: the same storm, without the bound on the canary's gaps."""

import http.client
import socket
import threading
import time

import pytest

from tests.e2e.live import LiveServer, ServeProcess, script_model
from tests.e2e.soak import allow_files, soak
from tests.e2e.soak_canary import Pulse, ask
from tests.e2e.soak_gaps import Gap, GapBook
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
                    asked = b""
                    while not asked.endswith(b"{}"):  # the head and the body are sent apart
                        asked += peer.recv(65536)
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


def test_a_gap_that_is_too_long_is_kept_with_the_steps_of_its_time(long_script_path):
    with LiveServer(long_script_path, num_threads=1, kv_memory_bytes=16 * 2**20) as server:
        book = GapBook(server.port, limit_ms=1)
        server.complete("a", max_tokens=3)  # before it
        begin_ns = time.monotonic_ns()
        server.complete("0" * 300, max_tokens=5, temperature=0)
        end_ns = time.monotonic_ns()
        server.complete("a", max_tokens=3)  # behind it
        book.note(Gap(begin_ns, end_ns, stalled_ms=(end_ns - begin_ns) / 1e6))
        assert book.kept == []  # the machine's, not the server's
        book.note(Gap(begin_ns, end_ns, stalled_ms=0.0))
    [told] = book.kept
    assert (told["num_steps"], told["calls"]) == (5, {"text_completion ok": 1})
    assert told["longest_step"]["tokens"].keys() <= {"prefill", "decode"}
    assert told["longest_step"]["phases_ms"]["forward"] <= told["longest_step"]["ms"]
    assert 0 <= told["longest_pause_ms"] <= told["server_ms"]


def test_only_the_longest_gaps_are_kept(long_script_path):
    with LiveServer(long_script_path, num_threads=1, kv_memory_bytes=16 * 2**20) as server:
        book, now_ns = GapBook(server.port, limit_ms=1), time.monotonic_ns()
        for number in range(9):
            book.note(Gap(now_ns - number * 10**7, now_ns, stalled_ms=0.0))
    assert [told["server_ms"] for told in book.kept] == [80, 70, 60, 50, 40]
    assert {told["num_steps"] for told in book.kept} == {0}


def test_a_pulse_tells_how_much_of_a_time_it_was_held_up():
    pulse = Pulse()
    pulse._late = [(10**6, 5 * 10**6), (20 * 10**6, 21 * 10**6)]
    assert pulse.take_ms(2 * 10**6, 10 * 10**6) == 3
    assert pulse.take_ms(0, 30 * 10**6) == 0  # forgotten
