"""A client that goes away stops its work at once, in every phase (SCH-04)."""

import json
import random
import socket
import time

import pytest

from tests.e2e.live import HttpServer, LiveServer, wait_until

MAX_TOKENS = 12_000


@pytest.fixture(scope="module")
def server(long_script_path):
    live = LiveServer(
        long_script_path, kv_memory_bytes=256 * 2**20, num_threads=1, max_num_seqs=4,
        max_batched_tokens=32, kv_dtype="f32",
    )  # fmt: skip
    yield live
    live.close()


def send(
    server: HttpServer, prompt: str = "0", *, headers: str = "", **body: object
) -> socket.socket:
    """Send a completions call over a raw socket and leave the answer unread."""
    fields = {
        "model": "script",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        **body,
    }
    content = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"%bContent-Length: %d\r\n\r\n%b" % (headers.encode(), len(content), content)
    )
    return connection


def reset(connection: socket.socket) -> None:
    """Close with a TCP reset instead of an orderly end."""
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


def is_busy(server: LiveServer) -> bool:
    stats = server.stats()
    return stats.num_running + stats.num_waiting > 0


@pytest.mark.parametrize("cut", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_mid_decode_stops_the_work(server, cut, stream, n):
    before = server.stats().num_generated_tokens
    connection = send(server, stream=stream, n=n)
    wait_until(lambda: server.stats().num_generated_tokens > before + 10)
    cut(connection)
    server.drain()
    assert server.stats().num_generated_tokens - before < n * MAX_TOKENS / 2
    server.survive()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_mid_prefill_stops_the_work(server, stream):
    before = server.stats().num_generated_tokens
    connection = send(server, prompt="0" * 12_000, stream=stream, max_tokens=10)
    wait_until(lambda: server.stats().num_running == 1)
    connection.close()
    server.drain()
    assert server.stats().num_generated_tokens == before
    server.survive()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_takes_the_request_out(server, stream):
    running = [send(server, stream=True) for _ in range(4)]
    wait_until(lambda: server.stats().num_running == 4)
    queued = send(server, stream=stream)
    wait_until(lambda: server.stats().num_waiting == 1)
    queued.close()
    wait_until(lambda: server.stats().num_waiting == 0, timeout_s=2)
    assert server.stats().num_running == 4
    for connection in running:
        connection.close()
    server.drain()
    server.survive()


def test_many_cut_requests_leave_nothing_behind(server):
    rng = random.Random(4)
    for round_number in range(60):
        connection = send(server, stream=rng.random() < 0.5, n=rng.choice((1, 4)),
                          prompt="0" * rng.choice((1, 200)))  # fmt: skip
        time.sleep(rng.random() * 0.02)
        rng.choice((socket.socket.close, reset))(connection)
        if round_number % 10 == 9:
            server.survive()
    server.drain()
    stats = server.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_reader_that_does_not_read_slows_nobody(server):
    silent = send(server, stream=True)
    start = time.monotonic()
    server.survive()
    assert time.monotonic() - start < 5
    silent.close()
    server.drain()


def test_closing_the_server_ends_running_streams(long_script_path):
    live = LiveServer(long_script_path, kv_memory_bytes=64 * 2**20, num_threads=1)
    connection = send(live, stream=True)
    wait_until(lambda: is_busy(live))
    start = time.monotonic()
    live.close()
    assert time.monotonic() - start < 8
    assert live.stats().num_live_blocks == 0
    connection.close()


def test_a_client_that_leaves_in_its_body_leaves_no_trace_in_the_log(server, caplog):
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    connection.sendall(head + b'{"model":')
    time.sleep(0.1)
    connection.close()
    time.sleep(0.2)
    server.survive()
    assert "Traceback" not in caplog.text
