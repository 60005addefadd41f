"""Connections that are held open without a request (SRV-03)."""

import socket
import time
from contextlib import suppress

import pytest

from paceline.server import body
from paceline.server.protocol import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedProtocol
from tests.e2e.live import ALPHABET, LiveServer, ServeProcess, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Impatient(BoundedProtocol):
    HEAD_TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def impatient(script_path):
    live = LiveServer(script_path, protocol=Impatient, kv_memory_bytes=8 * 2**20, num_threads=1)
    yield live
    live.close()


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def flood(connection) -> None:
    for _ in range(1000):
        connection.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")


def is_closed_by_peer(connection) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def all_of(connection) -> bytes:
    """Return what comes until the peer closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return received


@pytest.mark.parametrize("sent", [b"", b"POST", HEAD, HEAD + b"X: y\r\nX"])
def test_a_connection_without_a_whole_head_is_closed(impatient, sent):
    with connect(impatient) as connection:
        start = time.monotonic()
        connection.sendall(sent)
        assert is_closed_by_peer(connection)
        assert 0.2 < time.monotonic() - start < 4
    impatient.survive()


def test_a_slow_head_on_a_used_connection_is_closed_too(impatient):
    with connect(impatient) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /ver")
        assert is_closed_by_peer(connection)


def test_a_500_says_that_it_ends_its_connection(server, monkeypatch):
    def fail(self):
        raise RuntimeError("a bug")

    with connect(server) as connection, monkeypatch.context() as patch:
        patch.setattr(type(server.engine), "stats", fail)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    head, _, told = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500")
    assert b"connection: close" in head.lower()
    assert b"a bug" not in told
    server.survive()


def test_headers_without_end_are_cut(server):
    with connect(server) as connection:
        connection.sendall(HEAD)
        with suppress(OSError):  # unless the kernel takes it all before the server has read it
            flood(connection)
        assert b"HTTP/1.1 200" not in all_of(connection)
    server.survive()


@pytest.mark.parametrize(
    "too_long",
    [b"GET /version?%b HTTP/1.1\r\n", HEAD + b"X: %b\r\n", HEAD + b"X: y\r\n%b"],
    ids=["url", "value", "many"],
)
def test_a_long_head_is_refused_where_it_comes_in_one_piece(server, too_long):
    text = b"Y: z\r\n" * (MAX_HEAD_BYTES // 6) if too_long.endswith(b"%b") else b"x" * 65_510
    head = too_long % text + b"Content-Length: 2\r\n\r\n{}"
    assert 0 < len(head) - MAX_HEAD_BYTES < 250
    with connect(server) as connection:
        connection.sendall(head)
        assert b"Invalid HTTP request" in connection.recv(4096)
    server.survive()


def test_requests_that_come_before_their_answers_are_bounded(server):
    one = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(one * MAX_PIPELINED)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < MAX_PIPELINED:
            answers += connection.recv(2**16)
        connection.sendall(one * 1500)  # less than a head may have
        assert all_of(connection).count(b"HTTP/1.1 200") < 3 * MAX_PIPELINED
    server.survive()


def test_a_long_call_outlives_the_time_of_its_head(impatient):
    """The time is the head's alone."""
    text = b'{"model": "script", "prompt": "a", "temperature": 0}'
    with connect(impatient) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(text))
        time.sleep(0.6)
        connection.sendall(text)
        assert ALPHABET[1:].encode() in connection.recv(65536)


def test_a_body_that_does_not_come_is_a_408(server, monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    server.survive()


def test_few_file_handles_and_many_idle_connections_are_survived(script_path):
    limited = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
    with ServeProcess(script_path, "--kv-memory", "8M", prefix=limited) as server:
        server.survive()
        before = server.num_open_files
        idle = [connect(server) for _ in range(200)]
        for connection in idle:
            connection.close()
        server.client.close()
        wait_until(lambda: server.num_open_files <= before, timeout_s=20)
        with connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
