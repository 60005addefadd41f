"""Clients that do not take their replies: they are cut off, and what was kept for them is freed."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest

from paceline.server.protocol import BoundedProtocol
from tests.e2e.live import LiveServer, wait_until

# Replies of some megabytes, more than the buffers between two sockets hold.
LONG = {"prompt": "0", "temperature": 0, "max_tokens": 1200, "logprobs": 20, "n": 6}


class Impatient(BoundedProtocol):
    SEND_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def impatient(long_script_path):
    live = LiveServer(long_script_path, protocol=Impatient, kv_memory_bytes=2**26, num_threads=1)
    yield live
    live.close()


def ask(server, **body) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    content = json.dumps({"model": server.name, **LONG, **body}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )
    return connection


def rest(connection: socket.socket, *, pause_s: float = 0) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
            time.sleep(pause_s)
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_who_takes_nothing_is_cut_off(impatient, stream):
    num_ended = len(impatient.calls)
    with ask(impatient, stream=stream) as connection:
        wait_until(lambda: len(impatient.calls) > num_ended, timeout_s=20)
        assert impatient.calls[-1].is_gone or not stream
        received = rest(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}")
    impatient.drain()
    impatient.survive()


@pytest.mark.parametrize("stream", [False, True])
def test_who_takes_it_slowly_gets_all_of_it(impatient, stream):
    with ask(impatient, stream=stream) as connection:
        started = time.monotonic()
        received = rest(connection, pause_s=0.001)
        assert time.monotonic() - started > 2 * Impatient.SEND_TIMEOUT_S
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}")
    impatient.drain()
