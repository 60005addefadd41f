"""A server of several tiny models, and what its tests watch it by."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from paceline.cli.serve_models import Wanted, open_models, read_aliases
from paceline.config import EngineConfig
from paceline.server.admission import Limits
from paceline.server.app import create_models_app
from paceline.server.models.models import Models
from paceline.server.protocol import BoundedProtocol
from tests.e2e.live import ALPHABET, CallMemory, HttpServer, parse_events, texts, wait_until
from tests.tiny import TinyTokenizer, successor_model, write_gguf

KV = 4 * 2**20
SPELT = {"up": ALPHABET[1:], "down": ALPHABET[:0:-1]}  # what each writes after "a"


def spelling_model(folder: Path, name: str, **config: Any) -> Path:
    """Write a model that counts for ever after "0", and after "a" spells what `SPELT` says."""
    tokenizer = TinyTokenizer()
    ids = tokenizer.byte_ids
    chains = [
        [*ids("a" + SPELT[name]), tokenizer.eos_id],
        [*ids("0123456789"), *ids("0")],
        [*ids("\nHELO"), tokenizer.eot_id],
    ]
    model = successor_model(*chains, max_position_embeddings=16384, **config)
    return write_gguf(model, folder / f"{name}.gguf")


class SeveralServer(HttpServer):
    """Serves models over real HTTP from a thread of this process, as `paceline serve` would.

    Where `fits` is a number of models, the memory is enough for so many. `around_open` wraps what
    loads a model, by its name.
    """

    def __init__(
        self,
        *paths: Path,
        aliases: tuple[str, ...] = (),
        fits: int | None = None,
        around_open: Callable[[str, Callable[[Any], Any]], Callable[[Any], Any]] | None = None,
        limits: Limits | None = None,
        **options: Any,
    ) -> None:
        models = [str(path) for path in paths]
        config = EngineConfig(
            **{"ledger": True, "num_threads": 1, "kv_memory_bytes": KV, "max_num_seqs": 4} | options
        )
        wanted = Wanted(
            models=read_aliases(models, aliases), config=config, limits=limits or Limits(),
            num_tenants=1, pooling=None, weights="file", chat_template=None,
            memory=None,
        )  # fmt: skip
        memory = CallMemory()
        self.calls = memory.calls
        self.models: Models = open_models(wanted)
        if fits is not None:
            needs = sorted(entry.need.num_bytes for entry in self.models.entries)
            self.models._memory_bytes = sum(needs[-fits:]) + needs[0] // 2
        for entry in self.models.entries if around_open else ():
            entry.open = around_open(entry.name, entry.open)
        app = create_models_app(self.models, observers=[memory])
        self._server = uvicorn.Server(uvicorn.Config(
            app, host="127.0.0.1", port=0, log_config=None, lifespan="on",
            timeout_graceful_shutdown=1, http=BoundedProtocol,
        ))  # fmt: skip
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)
        super().__init__(paths[0].stem, self._server.servers[0].sockets[0].getsockname()[1])

    def ask(self, model: str, prompt: str = "a", **body: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "temperature": 0, **body}
        return self.client.post("/v1/completions", json=body)

    def spells(self, model: str, name: str = "") -> bool:
        answer = self.ask(model).json()
        return answer["choices"][0]["text"] == SPELT[name or model]

    def loaded(self) -> list[str]:
        listed = self.client.get("/v1/models").json()["data"]
        return [model["id"] for model in listed if model["loaded"]]

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)
        gc.unfreeze()
        assert not self._thread.is_alive()


class Reader:
    """Reads a stream of digits without end on a thread, until it is left."""

    def __init__(self, server: HttpServer, model: str, **body: Any) -> None:
        self.text = ""
        self._body = {"model": model, "prompt": "0", "stream": True, "temperature": 0, **body}
        self._url = f"http://127.0.0.1:{server.port}/v1/completions"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        wait_until(lambda: self.num_tokens)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def num_tokens(self) -> int:
        return self.text.count('"text":"')

    @property
    def written(self) -> str:
        return texts(parse_events(self.text[: self.text.rindex("\n\n") + 2].encode()))[0]

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=30) as response:
            for part in response.iter_text():
                self.text += part
                if self._is_over.is_set():
                    return
