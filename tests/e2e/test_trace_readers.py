"""/v1/trace under fire: how many are read at once, and for how long one may take."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from paceline.server import reports
from tests.e2e.live import wait_until

PIECE = b" " * 2**16
NUM_PIECES = 400  # more than the buffers between two sockets hold


@pytest.fixture
def long_trace(monkeypatch):
    """Every trace is longer than a client that does not read can take."""
    monkeypatch.setattr(reports, "trace_pieces", lambda *_: iter([PIECE] * NUM_PIECES))


def ask(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), 10)
    connection.sendall(b"GET /v1/trace HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(len("HTTP/1.1 200")).split()[1])


def rest(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(2**20):
        received += part
    return received


def is_let_in(server) -> bool:
    with ask(server) as connection:
        return status(connection) == 200


@pytest.mark.usefixtures("long_trace")
def test_traces_that_are_read_at_once_are_bounded(server):
    with ExitStack() as stack:
        readers = [stack.enter_context(ask(server)) for _ in range(reports.MAX_TRACES)]
        assert {status(reader) for reader in readers} == {200}
        refused = server.client.get("/v1/trace")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        server.survive()
        assert rest(readers[0]).endswith(b"\r\n0\r\n\r\n")
        wait_until(lambda: is_let_in(server))
    wait_until(lambda: all(is_let_in(server) for _ in range(reports.MAX_TRACES)))


@pytest.mark.usefixtures("long_trace")
def test_traces_that_are_asked_for_together_are_bounded(server):
    with ExitStack() as stack, ThreadPoolExecutor(40) as pool:
        readers = list(pool.map(lambda _: stack.enter_context(ask(server)), range(40)))
        seen = [status(reader) for reader in readers]
        assert sorted(seen) == [200] * reports.MAX_TRACES + [429] * (40 - reports.MAX_TRACES)
    wait_until(lambda: is_let_in(server))


@pytest.mark.usefixtures("long_trace")
def test_who_does_not_read_a_trace_in_time_is_cut_off_and_leaves_its_place(server, monkeypatch):
    monkeypatch.setattr(reports, "TRACE_TIMEOUT_S", 0.3)
    with ExitStack() as stack:
        readers = [stack.enter_context(ask(server)) for _ in range(reports.MAX_TRACES)]
        assert {status(reader) for reader in readers} == {200}
        wait_until(lambda: is_let_in(server), timeout_s=5)
        for reader in readers:
            assert not rest(reader).endswith(b"\r\n0\r\n\r\n")  # cut, and it shows
    server.survive()


@pytest.mark.usefixtures("long_trace")
def test_a_trace_that_is_read_in_time_is_whole(server):
    reply = httpx.get(f"http://127.0.0.1:{server.port}/v1/trace")
    assert len(reply.content) == NUM_PIECES * len(PIECE)
