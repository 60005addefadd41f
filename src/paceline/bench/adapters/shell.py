"""The HTTP side of the adapters: a peer's engine behind the OpenAI API, standard library only.

A peer may live in a Python of its own where nothing of ours is installed, so nothing is imported
here but Python itself. One thread runs the engine's steps, the event loop runs the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one stream: text, how many tokens it is, and why the stream ended, if it did."""

    stream: int
    text: str
    num_tokens: int
    finish_reason: str | None = None


class Engine(Protocol):
    """A peer, stepped. `num_slots` streams run at once; `context` bounds each."""

    name: str
    num_slots: int
    context: int

    def encode(self, messages: list[dict[str, Any]] | None, prompt: str | None) -> list[int]: ...

    def submit(self, stream: int, ids: list[int], max_tokens: int, ignore_eos: bool) -> None: ...

    def step(self) -> Iterable[Piece]: ...

    def drop(self, stream: int) -> None: ...


@dataclass(slots=True)
class Job:
    """A call that waits for a slot or runs in one."""

    stream: int
    ids: list[int]
    max_tokens: int
    ignore_eos: bool
    tell: Callable[[Piece], None]
    num_tokens: int = 0


class Runner:
    """Steps the engine while anything runs, and sleeps otherwise. First come, first served."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Job | int] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        threading.Thread(target=self._loop, daemon=True).start()

    def submit(self, job: Job) -> None:
        self._inbox.put(job)

    def abort(self, stream: int) -> None:
        self._inbox.put(stream)

    def _loop(self) -> None:
        while True:
            self._take_news(waits=not self._running and not self._waiting)
            while self._waiting and len(self._running) < self._engine.num_slots:
                job = self._waiting.popleft()
                self._running[job.stream] = job
                self._engine.submit(job.stream, job.ids, job.max_tokens, job.ignore_eos)
            if self._running:
                for piece in self._engine.step():
                    self._on_piece(piece)

    def _take_news(self, *, waits: bool) -> None:
        while waits or not self._inbox.empty():
            waits = False
            news = self._inbox.get()
            if isinstance(news, Job):
                self._waiting.append(news)
            elif self._running.pop(news, None) is not None:
                self._engine.drop(news)
            else:
                self._waiting = deque(job for job in self._waiting if job.stream != news)

    def _on_piece(self, piece: Piece) -> None:
        job = self._running[piece.stream]
        job.num_tokens += piece.num_tokens
        job.tell(piece)
        if piece.finish_reason is not None:
            del self._running[piece.stream]
            self._engine.drop(piece.stream)


@dataclass(slots=True)
class App:
    engine: Engine
    runner: Runner
    next_stream: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, body = await _read(reader)
            if method == "GET":
                models = {"object": "list", "data": [{"id": self.engine.name, "object": "model"}]}
                _answer(writer, 200, models)
            elif path in ("/v1/chat/completions", "/v1/completions"):
                await self._complete(path, json.loads(body), reader, writer)
            else:
                _answer(writer, 404, {"error": {"message": f"no route {path}"}})
        except (ValueError, KeyError) as error:
            _answer(writer, 400, {"error": {"message": str(error)}})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(
        self,
        path: str,
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_chat = path.startswith("/v1/chat")
        ids = self.engine.encode(
            body["messages"] if is_chat else None, None if is_chat else body["prompt"]
        )
        max_tokens = int(body.get("max_tokens") or self.engine.context - len(ids))
        if len(ids) + max_tokens > self.engine.context:
            raise ValueError(f"{len(ids)} + {max_tokens} tokens exceed {self.engine.context}")
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Piece | None] = asyncio.Queue()
        self.next_stream += 1

        def tell(piece: Piece) -> None:
            loop.call_soon_threadsafe(news.put_nowait, piece)

        job = Job(self.next_stream, ids, max_tokens, bool(body.get("ignore_eos")), tell)
        self.runner.submit(job)
        gone = asyncio.create_task(reader.read(1))
        gone.add_done_callback(lambda _: news.put_nowait(None))
        try:
            writer.write(_head(200, "text/event-stream", None))
            while (piece := await news.get()) is not None:
                if piece.text:
                    writer.write(_chunk(is_chat, piece.text, None))
                if piece.finish_reason is not None:
                    writer.write(_chunk(is_chat, "", piece.finish_reason))
                    if (body.get("stream_options") or {}).get("include_usage"):
                        usage = {"prompt_tokens": len(ids), "completion_tokens": job.num_tokens}
                        writer.write(_event({"choices": [], "usage": usage}))
                    writer.write(b"data: [DONE]\n\n")
                    await writer.drain()
                    return
        finally:
            gone.cancel()
            self.runner.abort(job.stream)


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
    length = int(headers.get("content-length", "0"))
    if length > MAX_BODY_BYTES:
        raise ValueError("the body is too long")
    return method, path, await reader.readexactly(length)


def _head(status: int, kind: str, length: int | None) -> bytes:
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}", f"Content-Type: {kind}"]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def _answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(_head(status, "application/json", len(data)) + data)


def _event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunk(is_chat: bool, text: str, finish_reason: str | None) -> bytes:
    content: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    return _event({"choices": [{"index": 0, **content, "finish_reason": finish_reason}]})


def main(build: Callable[[argparse.Namespace], Engine]) -> None:
    """Read the command line, build the engine and serve it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    arguments = parser.parse_args()
    serve(build(arguments), arguments.port)


def serve(engine: Engine, port: int) -> None:
    """Serve an engine on a port of this machine until the process ends."""

    async def run() -> None:
        app = App(engine, Runner(engine))
        server = await asyncio.start_server(app.serve, "127.0.0.1", port, backlog=512)
        await server.serve_forever()

    asyncio.run(run())
