"""Servers that are slow in one known way, and what `paceline explain` says of them."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from paceline.explain.report import Advice, Bound, Expected, Explanation, explain
from paceline.explain.situation import situation_of
from paceline.explain.sources import from_server
from tests.e2e.live import LiveServer, wait_until

_PATIENCE_S = 300.0  # planted causes are slow, and the machine may have other things to do


class PatientServer(LiveServer):
    """A server whose clients wait for long."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **options)
        self.client.timeout = httpx.Timeout(_PATIENCE_S)


def wait_for(is_so: Callable[[], bool]) -> None:
    wait_until(is_so, timeout_s=_PATIENCE_S)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 250) for _ in range(num_tokens)]


def ask(server: LiveServer, num_prompt: int, num_tokens: int, seed: int = 0) -> None:
    body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    server.complete(prompt(num_prompt, seed), **body)


def together(*jobs: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def at_once(server: LiveServer, num_calls: int, num_prompt: int, num_tokens: int) -> None:
    together(
        *(lambda i=i: ask(server, num_prompt, num_tokens, seed=i) for i in range(num_calls))
    )  # fmt: skip


def huge_prompts_beside_streams(server: LiveServer, num_prompt: int, num_tokens: int) -> None:
    """Three streams; when they have some tokens, two prompts one after the other."""
    streams = [lambda i=i: ask(server, 8, num_tokens, seed=i) for i in range(3)]

    def huge() -> None:
        wait_for(lambda: server.stats().num_generated_tokens > 15)
        for i in range(2):
            ask(server, num_prompt, 1, seed=9 + i)

    together(*streams, huge)


def under_one_system_prompt(server: LiveServer, num_shared: int) -> None:
    shared = prompt(num_shared, seed=77)
    for i in range(5):
        body = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
        server.complete(shared + prompt(40, seed=i), **body)


def read_slowly(server: LiveServer, num_tokens: int) -> None:
    """Begin to read when all tokens are made and three times as long has passed.

    The server needs `SmallBuffers`.
    """
    body = {"model": server.name, "prompt": prompt(8), "stream": True, "max_tokens": num_tokens,
            "logprobs": 20, "ignore_eos": True}  # fmt: skip
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    begin = time.monotonic()
    wait_for(lambda: server.stats().num_generated_tokens == num_tokens)
    time.sleep(3 * (time.monotonic() - begin))  # longer than all else together
    while connection.recv(1 << 20):
        pass
    connection.close()
    wait_for(lambda: bool(server.calls))


def explained(server: LiveServer) -> Explanation:
    wait_for(lambda: server.engine.stats().num_running == 0)
    time.sleep(0.1)  # the last call is booked a moment after its last byte
    return explain(situation_of(from_server(f"http://127.0.0.1:{server.port}", 600), None))


def bound_of(explanation: Explanation, metric: str, percentile: int) -> Bound:
    return next(
        b for b in explanation.bounds if (b.metric, b.percentile) == (metric, percentile)
    )  # fmt: skip


def expected_of(advice: Advice, metric: str, percentile: int) -> Expected:
    return next(
        e for e in advice.expected if (e.metric, e.percentile) == (metric, percentile)
    )  # fmt: skip


def lowers(advice: Advice, metric: str) -> bool:
    return any(e.metric == metric and e.after_ms < e.before_ms for e in advice.expected)
