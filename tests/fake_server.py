"""FAKE: a server that plays a script to the millisecond, and notes when it really wrote what."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODELS = b'{"object":"list","data":[{"id":"fake","object":"model"}]}'


@dataclass(frozen=True)
class Script:
    """What one request gets: bytes at milliseconds after it came in, then an end.

    `texts` are the indices of the steps that bring the reader new text.
    """

    steps: tuple[tuple[float, bytes], ...]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/event-stream"),)
    end: str = "close"  # close, reset, cut (no last HTTP chunk) or hang
    texts: tuple[int, ...] = ()


@dataclass
class Served:
    """A request as the server saw it; times are of the clock that the client reads too.

    A step is written between `begun_at` and `written_at`: on a busy machine they differ.
    """

    body: dict[str, Any]
    came_at: float
    begun_at: list[float] = field(default_factory=list)
    written_at: list[float] = field(default_factory=list)
    ended_at: float | None = None  # after the last HTTP chunk, where there is one
    left_at: float | None = None


Choose = Callable[[int, dict[str, Any]], Script]


class FakeServer:
    """Listens on a free port from a thread; `choose(number, body)` gives a request its script."""

    def __init__(self, choose: Choose, *, is_exact: bool = True) -> None:
        self.served: list[Served] = []
        self._choose = choose
        self._is_exact = is_exact  # to a tenth of a millisecond, for CPU time
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._stop.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            if head.startswith("GET"):
                writer.write(_head(200, (("Content-Length", str(len(MODELS))),)) + MODELS)
                await writer.drain()
                return
            length = int(re.search(r"(?i)content-length: (\d+)", head)[1])
            body = json.loads(await reader.readexactly(length))
            served = Served(body, time.perf_counter())
            self.served.append(served)
            script = self._choose(len(self.served) - 1, body)
            await self._play(script, served, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _play(
        self,
        script: Script,
        served: Served,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        headers = (*script.headers, ("Transfer-Encoding", "chunked"))
        gone = asyncio.create_task(self._notice_end(reader, served))
        try:
            writer.write(_head(script.status, headers))
            for at_ms, data in script.steps:
                await self._sleep_until(served.came_at + at_ms / 1e3)
                if served.left_at is not None:
                    return
                served.begun_at.append(time.perf_counter())
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                served.written_at.append(time.perf_counter())
            if script.end == "hang":
                await gone
            elif script.end == "reset":
                linger = struct.pack("ii", 1, 0)  # closing sends RST
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                writer.transport.abort()
            elif script.end == "close":
                writer.write(b"0\r\n\r\n")
                served.ended_at = time.perf_counter()
                await writer.drain()
        finally:
            gone.cancel()

    async def _sleep_until(self, moment: float) -> None:
        """Event loops round their timers to milliseconds: the last two are polled."""
        polled_s = 0.002 if self._is_exact else 0.0
        left = moment - time.perf_counter()
        if left > polled_s:
            await asyncio.sleep(left - polled_s)
        while self._is_exact and time.perf_counter() < moment:
            await asyncio.sleep(0)

    @staticmethod
    async def _notice_end(reader: asyncio.StreamReader, served: Served) -> None:
        try:
            await reader.read()
        finally:
            served.left_at = time.perf_counter()


def _head(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    """Return a chat chunk with that delta."""
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


ROLE = delta(role="assistant", content="")
EMPTY = delta(content="")
FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(
        choices=[],
        usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    )


def steady(
    *, ttft_ms: float, gap_ms: float, tokens: int, prompt_tokens: int = 7, **settings: Any
) -> Script:
    """Return the script of a plain good answer of `tokens` chunks."""
    steps: list[tuple[float, bytes]] = [(0, ROLE)]
    steps += [(ttft_ms + i * gap_ms, delta(content=f" w{i}")) for i in range(tokens)]
    last = steps[-1][0]
    steps.append((last, FINISH + usage(prompt_tokens, tokens) + DONE))
    return Script(tuple(steps), texts=tuple(range(1, tokens + 1)), **settings)
