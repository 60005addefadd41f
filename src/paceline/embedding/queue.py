"""EmbeddingQueue: texts of many calls share the steps of one embedder, in turns."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from msgspec import Struct

from paceline.backends.base import F32
from paceline.embedding.embedder import Embedder
from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

_MEMORY = 0.9  # of the speed of earlier steps, at each new one


class QueueClosedError(PacelineError):
    """The queue takes no more texts, or closed before it came to these."""


class _Call(Struct):
    """The texts of one call: those to come, and the vectors that there are."""

    texts: Sequence[Sequence[int]]
    vectors: F32
    future: Future[F32]
    num_tokens: int  # of texts without a vector
    next: int = 0  # the first text that no step has taken
    num_done: int = 0


class EmbeddingQueue:
    """Computes on a thread of its own, which opens the embedder when the first text comes.

    Calls take turns, a text each, so a call of thousands of texts does not keep out one of one. A
    cancelled future takes its texts with it. `submit` may be called from any thread.
    """

    def __init__(self, open_embedder: Callable[[], Embedder], *, dim: int) -> None:
        self._open = open_embedder
        self._dim = dim
        self._tokens_per_s = 0.0
        self._wakeup = threading.Condition()  # guards all below
        self._calls: deque[_Call] = deque()  # that have texts which no step has taken
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts that wait for a step."""
        with self._wakeup:
            return sum(call.num_tokens for call in self._calls if not call.future.cancelled())

    def predict_s(self) -> float | None:
        """Return the time until all that waits is done; None: no idea."""
        return self.num_tokens / self._tokens_per_s if self._tokens_per_s else None

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[F32]:
        """Queue texts, at least one; the result is their vectors [n, dim]."""
        vectors = np.empty((len(texts), self._dim), np.float32)
        call = _Call(texts, vectors, Future(), sum(map(len, texts)))
        with self._wakeup:
            if self._is_closing:
                raise QueueClosedError("no more texts are taken: the server is shutting down")
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="embedder", daemon=True)
                self._thread.start()
            self._wakeup.notify()
        return call.future

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what waits, end the thread after its step, free the embedder. Idempotent."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        embedder: Embedder | None = None
        while batch := self._take(embedder):
            try:
                embedder = embedder or self._open()
                self._compute(embedder, batch)
            except Exception as error:
                logger.exception("a step of %d texts failed", len(batch))
                self._fail([call for call, _ in batch], error)
        if embedder is not None:
            embedder.close()

    def _compute(self, embedder: Embedder, batch: list[tuple[_Call, int]]) -> None:
        start_s = time.monotonic()
        vectors = embedder.embed_batch([call.texts[i] for call, i in batch])
        speed = sum(len(call.texts[i]) for call, i in batch) / (time.monotonic() - start_s)
        self._tokens_per_s += (1 - _MEMORY if self._tokens_per_s else 1) * (
            speed - self._tokens_per_s
        )
        for (call, i), vector in zip(batch, vectors, strict=True):
            call.vectors[i] = vector
            call.num_done += 1
            if call.num_done == len(call.texts) and call.future.set_running_or_notify_cancel():
                call.future.set_result(call.vectors)

    def _take(self, embedder: Embedder | None) -> list[tuple[_Call, int]]:
        """Wait for texts; return those of the next step, none when the queue closes.

        The first step holds one text: only an embedder that is open says how many fit.
        """
        batch: list[tuple[_Call, int]] = []
        lengths: list[int] = []
        with self._wakeup:
            while not batch:
                while not (self._calls or self._is_closing):
                    self._wakeup.wait()
                if self._is_closing:
                    self._end(self._calls, QueueClosedError("the server is shutting down"))
                    return []
                while self._calls:
                    call = self._calls.popleft()
                    if call.future.cancelled():
                        continue
                    lengths.append(len(call.texts[call.next]))
                    if batch and (embedder is None or not embedder.fits(lengths)):
                        self._calls.appendleft(call)
                        break
                    batch.append((call, call.next))
                    call.next += 1
                    call.num_tokens -= lengths[-1]
                    if call.next < len(call.texts):
                        self._calls.append(call)
        return batch

    def _fail(self, calls: Sequence[_Call], error: Exception) -> None:
        """End calls with an error, with the texts of theirs that still wait."""
        failed = {id(call) for call in calls}
        with self._wakeup:
            self._calls = deque(call for call in self._calls if id(call) not in failed)
        self._end(calls, error)

    def _end(self, calls: Iterable[_Call], error: Exception) -> None:
        for call in calls:
            if not call.future.done() and call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
