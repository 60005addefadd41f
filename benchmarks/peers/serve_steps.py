"""An HTTP server over an engine's steps, for peers whose package has none that batches.

    python serve_steps.py MODULE MODEL PORT '{"num_threads": 2, "context": 512, ...}'

One thread runs the steps; requests join and leave between two of them. Speaks the part of
`/v1/completions` that `load.py` uses: token ids in, an event a token out, without its text, which
spares the engine the work of decoding it. Needs only the standard library and the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import dataclass
from typing import Any

from worker import StepEngine, load_engine

_EVENT = b'data: {"choices":[{"index":0,"text":"-"}]}\n\n'


@dataclass(slots=True)
class _Stream:
    """A request in progress; its events go to `queue` on the event loop, None ends it."""

    prompt: list[int]
    num_left: int
    queue: asyncio.Queue[bytes | None]
    is_cancelled: bool = False


class Stepper:
    """Owns the engine and the thread that steps it."""

    def __init__(
        self, engine: StepEngine, max_streams: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._engine = engine
        self._max_streams = max_streams
        self._loop = loop
        self._waiting: list[_Stream] = []
        self._running: dict[int, _Stream] = {}
        self._changed = threading.Condition()
        self._num_streams = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, stream: _Stream) -> None:
        with self._changed:
            self._waiting.append(stream)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running):
                    self._changed.wait()
                for stream in self._waiting:
                    if stream.is_cancelled:
                        self._send(stream, None)
                self._waiting = [s for s in self._waiting if not s.is_cancelled]
                num_free = self._max_streams - len(self._running)
                joining, self._waiting = self._waiting[:num_free], self._waiting[num_free:]
            for stream in joining:
                self._num_streams += 1
                self._running[self._num_streams] = stream
                self._engine.submit(self._num_streams, stream.prompt)
            for number in self._engine.step():
                self._running[number].num_left -= 1
                self._send(self._running[number], _EVENT)
            self._end()

    def _send(self, stream: _Stream, event: bytes | None) -> None:
        self._loop.call_soon_threadsafe(stream.queue.put_nowait, event)

    def _end(self) -> None:
        """Drop the streams that are complete, and those whose client has left."""
        ended = [n for n, s in self._running.items() if s.num_left == 0 or s.is_cancelled]
        self._engine.drop(ended)
        for number in ended:
            self._send(self._running.pop(number), None)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return (path, body) of one HTTP request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return first.split(" ")[1], body


async def serve(engine: StepEngine, port: int, max_streams: int) -> None:
    stepper = Stepper(engine, max_streams, asyncio.get_running_loop())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        if path != "/health":
            request = json.loads(body)
            stream = _Stream(request["prompt"], request["max_tokens"], asyncio.Queue())
            stepper.add(stream)
            gone = asyncio.create_task(reader.read())  # ends when the client leaves
            gone.add_done_callback(lambda _: setattr(stream, "is_cancelled", True))
            while (event := await stream.queue.get()) is not None:
                writer.write(event)
            writer.write(b"data: [DONE]\n\n")
            gone.cancel()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    module, model, port, text = sys.argv[1:]
    options: dict[str, Any] = json.loads(text)
    engine = load_engine(module, model, options)
    asyncio.run(serve(engine, int(port), options["num_streams"]))


if __name__ == "__main__":
    main()
