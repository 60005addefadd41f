"""Models: those of one server, by name; loaded when they are asked for, as far as memory goes."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI

from paceline.engine.memory import available_memory, format_bytes
from paceline.errors import PacelineError
from paceline.server.admission import Limits
from paceline.server.answers import MAX_OPEN_CALLS
from paceline.server.embeddings import Embeddings
from paceline.server.errors import ApiError
from paceline.server.models.entry import Entry
from paceline.server.models.served import Served, ServedEncoder

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_RETRY_S = 5.0  # after which a busy model may be idle: nobody knows how long answers will be


class Models:
    """The models of a server. Used on the event loop, but `stop`.

    The `first` that writes, of encoders alone the first, is for what names no model.

    All that is loaded takes at most `memory_bytes`, weights and KV pools by their full size. One
    is loaded or unloaded at a time, on another thread.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        limits: Limits | None = None,
        num_tenants: int = 1,
        memory_bytes: int | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self.first = next((e for e in entries if not e.is_encoder), entries[0])
        self._limits = limits or Limits()
        self._num_tenants = num_tenants
        self._memory_bytes = memory_bytes
        self._by_name = {name: entry for entry in entries for name in entry.names}
        self._changing = asyncio.Lock()
        # Always the same: each thread that allocates keeps an arena of some 10 MB.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="models")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = asyncio.Event()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start with the models that are there already; close all at the end."""
        self._loop = asyncio.get_running_loop()
        for entry in self.entries:
            if entry.opened is not None:
                self._start(entry, self._serve(entry))
        try:
            yield
        finally:
            self._is_stopping.set()
            for entry in self.entries:
                if entry.loading is not None:
                    await entry.loading
                if entry.served is not None:
                    await self._aside(entry.served.close)
            self._thread.shutdown()

    def find(self, name: str) -> Entry:
        """Return the model that `name` means. Raises ApiError 404 naming those that are served."""
        entry = self._by_name.get(name)
        if entry is None:
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here: ask for "
                f"{' or '.join(map(repr, self._by_name))}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return entry

    async def use(self, entry: Entry) -> Served | ServedEncoder:
        """Return the model, loaded. Raises ApiError saying why it cannot be.

        Precondition: it is `in_use`, or it might go while the caller is told of it.
        """
        while entry.served is None:
            if entry.num_calls > MAX_OPEN_CALLS:
                raise ApiError(
                    429, f"{MAX_OPEN_CALLS} calls wait for {entry.name} to be loaded: try again "
                    "later", retry_after_s=_RETRY_S,
                )  # fmt: skip
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._load(entry))
            await self._wait(entry.loading)
        return entry.served

    async def _wait(self, loading: asyncio.Task[ApiError | None]) -> None:
        """Wait for a loading, which goes on if the caller is cancelled. Raises why it failed."""
        stopping = asyncio.create_task(self._is_stopping.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if not loading.done() or self._is_stopping.is_set():
            raise ApiError(
                503, "the server is shutting down: try again later", code="shutting_down",
                retry_after_s=1,
            )  # fmt: skip
        if (error := loading.result()) is not None:
            raise error

    async def _load(self, entry: Entry) -> ApiError | None:
        """Load a model; return why it could not be. The next call that wants it tries again."""
        try:
            async with self._changing:
                await self._make_room(entry)
                logger.info("%s is loaded: a call wants it", entry.name)
                served = await self._aside(lambda: self._open(entry))
                if self._is_stopping.is_set():
                    await self._aside(served.close)
                else:
                    self._start(entry, served)
        except ApiError as error:
            return error
        except PacelineError as error:
            logger.error("%s could not be loaded: %s", entry.name, error)
            return _failed(entry, f": {entry.without_path(error)}")
        except Exception:
            logger.exception("%s could not be loaded", entry.name)
            return _failed(entry, "; the server's log says why")
        finally:
            entry.loading = None
        return None

    async def _aside(self, work: Callable[[], _T]) -> _T:
        """Return what `work` does, on the thread that loads and unloads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self, entry: Entry) -> Served | ServedEncoder:
        assert entry.open is not None
        entry.opened = entry.open(entry.books.recorder)
        return self._serve(entry)

    def _serve(self, entry: Entry) -> Served | ServedEncoder:
        assert entry.opened is not None
        opened, entry.opened = entry.opened, None
        if isinstance(opened, Embeddings):
            return ServedEncoder(opened)
        loaded, embeddings = opened
        return Served(loaded, embeddings, limits=self._limits, num_tenants=self._num_tenants)

    def _start(self, entry: Entry, served: Served | ServedEncoder) -> None:
        entry.books.open(served.loaded)
        served.start()
        entry.served = served

    async def _make_room(self, entry: Entry) -> None:
        """Unload what is idle, least recently used first, until `entry` fits. ApiError 503."""
        while (lack := entry.need.num_bytes - self._room()) > 0:
            idle = [other for other in self.entries if other.is_idle]
            if sum(other.need.num_bytes for other in idle) < lack:
                raise self._no_room(entry, lack)
            await self._unload(min(idle, key=lambda other: other.used_s))

    def _no_room(self, entry: Entry, lack: int) -> ApiError:
        busy = [e.name for e in self.entries if e.served is not None and not e.is_idle]
        holders = f"models that answer calls ({', '.join(busy)})" if busy else "other programs"
        return ApiError(
            503, f"{entry.name} needs {format_bytes(entry.need.num_bytes)} of memory, "
            f"{format_bytes(lack)} more than is left; {holders} have the rest: try again later, or "
            "raise --model-memory",
            code="model_memory", retry_after_s=_RETRY_S,
        )  # fmt: skip

    def _room(self) -> int:
        """Return the bytes that are left for models: of the bound, and of the machine."""
        free = available_memory()
        if self._memory_bytes is None:
            return free
        taken = sum(e.need.num_bytes for e in self.entries if e.served is not None)
        return min(self._memory_bytes - taken, free)

    async def _unload(self, entry: Entry) -> None:
        served, entry.served = entry.served, None  # who asks for it now waits, and loads it again
        assert served is not None
        await self._aside(served.close)
        entry.books.close()
        del served
        await self._aside(_collect)
        logger.info("%s is unloaded: another model needs its memory", entry.name)

    def stop(self) -> None:
        """End what calls wait for: loading, and answers. For another thread than the loop's."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._is_stopping.set)
        for entry in self.entries:
            served = entry.served
            if served is not None:
                served.stop()


def _failed(entry: Entry, reason: str) -> ApiError:
    return ApiError(
        503, f"the model {entry.name!r} could not be loaded{reason}",
        code="model_load_failed", retry_after_s=_RETRY_S,
    )  # fmt: skip


def _collect() -> None:
    """Free what only cycles hold: the files of a model stay mapped as long as its objects live."""
    num_frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if num_frozen:
        gc.freeze()
