"""Entry: one model of a server, loaded or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Union

from paceline.config import EngineConfig
from paceline.server.books import Books
from paceline.server.errors import ApiError
from paceline.server.models.needs import Need

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel
    from paceline.measure.recorder import StepRecorder
    from paceline.server.embeddings import Embeddings
    from paceline.server.models.served import Served, ServedEncoder

# A model that writes and, where it embeds too, what does; or what embeds with an encoder.
Opened = Union["tuple[LoadedModel, Embeddings | None]", "Embeddings"]
Open = Callable[["StepRecorder | None"], Opened]


class Entry:
    """What a model is called and needs, and what is there of it. Used on the event loop.

    `open` loads it, on any thread; it goes on with a recorder of the engine before.
    """

    def __init__(
        self,
        name: str,
        *,
        need: Need,
        config: EngineConfig,
        path: Path,
        open: Open | None = None,
        opened: Opened | None = None,
        aliases: tuple[str, ...] = (),
        is_encoder: bool = False,
    ) -> None:
        self.name = name
        self.aliases = aliases
        self.is_encoder = is_encoder  # it embeds texts and writes none
        self.need = need
        self._path = path
        self.open = open
        self.opened = opened  # before the server starts, of a model that is to be there at once
        self.books = Books(name, config, is_encoder=is_encoder)
        self.served: Served | ServedEncoder | None = None
        self.loading: asyncio.Task[ApiError | None] | None = None
        self.num_calls = 0  # that use it, or wait for it
        self.used_s = 0.0  # when the last of them ended

    @classmethod
    def of(cls, loaded: LoadedModel, embeddings: Embeddings | None) -> Entry:
        """Return the only model of a server, which stays loaded."""
        need = Need(
            weight_bytes=loaded.weight_bytes,
            kv_bytes=loaded.kv.num_bytes,
            max_model_len=loaded.kv.max_model_len,
        )
        return cls(
            loaded.name, need=need, config=loaded.config, path=loaded.path,
            opened=(loaded, embeddings), aliases=loaded.aliases,
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def is_idle(self) -> bool:
        """It is loaded, and nobody would miss it now."""
        return self.served is not None and not self.num_calls and self.served.is_idle

    def without_path(self, error: Exception) -> str:
        """Return what an error says, for clients: where files lie is not for them."""
        return str(error).replace(str(self._path), self.name)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While inside, it is not idle."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1
            self.used_s = time.monotonic()
