"""A real server on a free port, and what its tests need to talk to it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn

from paceline.config import EngineConfig
from paceline.engine.build import LoadedModel, load_model
from paceline.server.admission import Limits
from paceline.server.app import create_app
from paceline.server.calls import Call
from paceline.server.door import Keys
from paceline.server.protocol import BoundedProtocol
from paceline.server.timekeeping import TimedProtocol
from tests.tiny import TinyTokenizer, successor_model, write_gguf

TOKENIZER = TinyTokenizer()
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
EMOJI = "#😀中$"
PACELINE = (sys.executable, "-c", "from paceline.cli.main import main; main()")


def script_model(folder: Path, *, max_context: int = 512) -> Path:
    """Write a model that spells: "a" goes on with "bc…z", "0" counts for ever, chat says HELO."""
    ids = TOKENIZER.byte_ids
    chains = [
        [*ids(ALPHABET), TOKENIZER.eos_id],
        [*ids("0123456789"), *ids("0")],
        [*ids("\nHELO"), TOKENIZER.eot_id],
        [*ids(EMOJI), TOKENIZER.eos_id],
    ]
    model = successor_model(*chains, max_position_embeddings=max_context)
    return write_gguf(model, folder / "script.gguf")


class HttpServer:
    """What tests say to a server that listens on `port`, and what they ask of it afterwards."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.name, **body})

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any = "Hi", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        response = self.post("/v1/chat/completions", messages=messages, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the events of a stream, its framing checked; [DONE] is the last."""
        request = {"model": self.name, "stream": True, **body}
        with self.client.stream("POST", path, json=request) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return parse_events(b"".join(response.iter_raw()))

    def stats(self) -> Any:
        """Return the engine's books, as /health shows them."""
        return SimpleNamespace(**self.client.get("/health").json()["engine"])

    def drain(self) -> None:
        """DRAIN: nothing runs, nothing waits, no block is held."""

        def is_drained() -> bool:
            stats = self.stats()
            return (stats.num_running, stats.num_waiting, stats.num_live_blocks) == (0, 0, 0)

        wait_until(is_drained, timeout_s=2)
        generated = self.stats().num_generated_tokens
        time.sleep(0.02)
        assert self.stats().num_generated_tokens == generated

    def survive(self) -> None:
        """SURVIVE: healthy, and a canary request gives its usual text."""
        assert self.client.get("/health").json()["status"] == "ok"
        assert self.complete("a", temperature=0)["choices"][0]["text"] == ALPHABET[1:]


class CallMemory:
    """An observer that remembers the calls that have ended."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def write(self, call: Call) -> None:
        self.calls.append(call)

    def close(self) -> None:
        pass


class LiveServer(HttpServer):
    """Serves a model over real HTTP from a thread of this process."""

    def __init__(
        self,
        model: Path,
        *,
        chat_template: str | None = None,
        protocol: type[TimedProtocol] = BoundedProtocol,
        limits: Limits | None = None,
        keys: Keys | None = None,
        **options: Any,
    ) -> None:
        engine_config = EngineConfig(**{"ledger": True, **options})
        self.loaded: LoadedModel = load_model(
            str(model), engine_config, chat_template=chat_template
        )
        self.engine = self.loaded.engine
        memory = CallMemory()
        self.calls = memory.calls
        config = uvicorn.Config(
            create_app(self.loaded, observers=[memory], limits=limits, keys=keys),
            host="127.0.0.1", port=0, log_config=None, lifespan="on",
            timeout_graceful_shutdown=1, http=protocol,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        super().__init__(self.loaded.name, self._server.servers[0].sockets[0].getsockname()[1])

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stats(self) -> Any:
        return self.engine.stats()


class ServeProcess(HttpServer):
    """`paceline serve` as a process of its own."""

    def __init__(self, model: Path, *options: str, prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, *PACELINE, "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""
        line = ""
        while " serving " not in f" {line} ":
            line = self.process.stderr.readline()
            assert line, f"the server did not start: {self.log}"
            self.log += line
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        super().__init__(model.stem if model.is_file() else model.name,
                         int(line.split(":")[-1].split("/")[0]))  # fmt: skip

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log += line

    @property
    def num_open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def survive(self) -> None:
        assert self.process.poll() is None
        super().survive()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(10)
        self._reader.join(5)
        self.process.stderr.close()
        assert "Traceback" not in self.log


class Canary:
    """Streams the same answer over and over on a connection of its own while inside."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sing, daemon=True)
        self.heard: list[str] = []

    def _sing(self) -> None:
        body = {"model": self._server.name, "prompt": "a", "temperature": 0, "stream": True}
        url = f"http://127.0.0.1:{self._server.port}/v1/completions"
        with httpx.Client(timeout=30) as client:
            while not self._is_over.is_set():
                with client.stream("POST", url, json=body) as response:
                    events = parse_events(b"".join(response.iter_raw()))
                self.heard.append(texts(events)[0])

    def __enter__(self) -> Canary:
        self._thread.start()
        wait_until(lambda: self.heard)
        return self

    def __exit__(self, *_: object) -> None:
        """Every answer was the usual one, to the last."""
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert set(self.heard) == {ALPHABET[1:]}


def parse_events(raw: bytes) -> list[Any]:
    """Return the events of an SSE body: each one `data: …` line and a blank line."""
    assert raw.endswith(b"\n\n")
    blocks = raw.decode().split("\n\n")[:-1]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def texts(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice, put together from its deltas."""
    joined: dict[int, str] = {}
    for choice in choices(events):
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


def choices(events: list[Any]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event != "[DONE]":
            yield from event["choices"]


def wait_until(is_true: Any, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
