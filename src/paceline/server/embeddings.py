"""/v1/embeddings: texts or token ids in, their vectors out."""

from __future__ import annotations

import asyncio
import base64
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from paceline.backends.base import F32
from paceline.embedding.build import EmbeddingModel
from paceline.embedding.queue import EmbeddingQueue, QueueClosedError
from paceline.engine.checks import check_ids
from paceline.errors import PacelineError
from paceline.measure.ledger import Part
from paceline.server.body import read_body, request_id
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.params import header_ms
from paceline.server.schema import parse
from paceline.server.texts import split_texts
from paceline.server.timekeeping import CALL
from paceline.server.tokens import check_model

EMBEDDINGS_PATH = "/v1/embeddings"
MAX_INPUTS = 2048
MAX_TOKENS = 300_000  # of one call
MAX_WAITING_TOKENS = 1_000_000  # of all calls
_encode = msgspec.json.Encoder().encode


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields."""

    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None  # checked for its type, kept nowhere


class Embeddings:
    """Answers calls for one model. `max_waiting` bounds the tokens of all calls in the queue."""

    def __init__(self, model: EmbeddingModel, *, max_waiting: int | None = None) -> None:
        self.model = model
        self._queue = EmbeddingQueue(model.open, dim=model.dim)
        self._max_waiting = max_waiting or MAX_WAITING_TOKENS
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedding-text")

    async def embeddings(self, http: HttpRequest) -> Response:
        call: Call | None = http.scope.get("state", {}).get(CALL)
        begin_s = time.monotonic() if call is None else call.begin_ns / 1e9
        deadline_ms = header_ms(http.headers.get("x-request-deadline-ms"))
        body = await read_body(http)
        loop = asyncio.get_running_loop()
        request, texts = await loop.run_in_executor(self._threads, self._prepare, body, call)
        _lap(call, Part.TOKENISE)
        num_tokens = sum(map(len, texts))
        waiting = self._queue.num_tokens
        if waiting and waiting + num_tokens > self._max_waiting:
            raise ApiError(
                429, f"the queue is full: {waiting} tokens wait to be embedded, {num_tokens} more "
                f"are beyond its {self._max_waiting}; try again later",
                code="queue_full", retry_after_s=self._queue.predict_s() or 1.0,
            )  # fmt: skip
        left_s = None
        if deadline_ms is not None:
            left_s = max(begin_s + deadline_ms / 1e3 - time.monotonic(), 0.0)
            self._check_deadline(deadline_ms, left_s)
        try:
            vectors = await _attended(self._queue.submit(texts), http.receive, left_s)
        except TimeoutError:
            raise ApiError(
                504, f"the deadline of {deadline_ms:g} ms has passed: give it more time, or send "
                "fewer texts", code="deadline_exceeded",
            ) from None  # fmt: skip
        except QueueClosedError as error:
            raise ApiError(503, str(error), code="shutting_down", retry_after_s=1) from None
        except PacelineError as error:  # the request was checked: what fails now is the server
            raise ApiError(500, str(error)) from None
        _lap(call, Part.PREFILL)
        answer = await loop.run_in_executor(
            self._threads, self._answer, vectors, num_tokens, request.encoding_format == "base64"
        )
        _lap(call, Part.SEND)
        if call is not None:
            call.num_embedded = num_tokens
        headers = {"x-request-id": request_id(http)}
        return Response(answer, media_type="application/json", headers=headers)

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    def close(self) -> None:
        """Fail what waits, free the model's memory. Idempotent."""
        self._queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_deadline(self, deadline_ms: float, left_s: float) -> None:
        """Raise ApiError 429 where what waits already takes longer."""
        predicted_s = self._queue.predict_s()
        if predicted_s is not None and predicted_s > left_s:
            raise ApiError(
                429, f"the deadline of {deadline_ms:g} ms cannot be met: what waits would take "
                f"about {predicted_s * 1e3:.0f} ms; try again later",
                code="deadline_unreachable", retry_after_s=predicted_s,
            )  # fmt: skip

    def _prepare(self, body: bytes, call: Call | None) -> tuple[EmbeddingRequest, list[list[int]]]:
        """Return the request and the token ids of its texts. Raises ApiError or ParameterError."""
        request = parse(body, EmbeddingRequest)
        model = self.model
        if call is not None:
            call.asked_for(request.model)
        check_model(request.model, model)
        if request.dimensions not in (None, model.dim):
            raise ApiError(
                400, f"dimensions is {request.dimensions}: the vectors of {model.name} have "
                f"{model.dim}, and it was not trained to be cut; leave it out",
                param="dimensions", code="unsupported_parameter",
            )  # fmt: skip
        items = split_texts(request.input, param="input", most=MAX_INPUTS)
        texts: list[list[int]] = []
        num_tokens = 0
        for idx, item in enumerate(items):
            texts.append(self._ids(item, f"input[{idx}]" if len(items) > 1 else "input"))
            num_tokens += len(texts[-1])
            if num_tokens > MAX_TOKENS:
                raise ApiError(
                    400, f"input has more than {MAX_TOKENS} tokens in all: send fewer texts a call",
                    param="input",
                )  # fmt: skip
        return request, texts

    def _ids(self, item: str | list[int], param: str) -> list[int]:
        if isinstance(item, str):
            if not item:
                raise ApiError(400, f"{param} is empty: send a text", param="input")
            return self.model.encode(item, param=param)
        check_ids(item, param="input", num_ids=self.model.tokenizer.vocab_size)
        self.model.check(item, param=param)
        return item

    def _answer(self, vectors: F32, num_tokens: int, is_base64: bool) -> bytes:
        """Return the JSON, vector by vector: one piece would hold up other threads."""
        data = []
        for idx, vector in enumerate(vectors):
            raw = np.ascontiguousarray(vector, "<f4")
            shown = base64.b64encode(raw.tobytes()).decode() if is_base64 else raw.tolist()
            data.append(_encode({"object": "embedding", "index": idx, "embedding": shown}))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        tail = _encode({"model": self.model.name, "usage": usage})[1:]
        return b'{"object":"list","data":[' + b",".join(data) + b"]," + tail


def writes_nothing(name: str) -> ApiError:
    """Return what to say to who asks an encoder to write."""
    return ApiError(
        400, f"{name} embeds texts and writes none: ask {EMBEDDINGS_PATH}",
        param="model", code="unsupported_model",
    )  # fmt: skip


def _lap(call: Call | None, part: Part) -> None:
    """Book the time since the last lap of a call, where somebody keeps its time."""
    if call is not None:
        call.lap(part)


async def _attended(future: Future[F32], receive: Receive, left_s: float | None) -> F32:
    """Return the future's result; a client that hangs up meanwhile cancels it. ApiError 499.

    Raises TimeoutError where it takes more than `left_s`, which cancels it, too.
    """
    result = asyncio.wrap_future(future)
    gone: asyncio.Future[Any] = asyncio.create_task(_disconnect(receive))
    try:
        ended, _ = await asyncio.wait(
            {result, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=left_s
        )
        if not ended:
            raise TimeoutError
        if not result.done():
            raise ApiError(499, "the client left before its vectors were there")
        return result.result()
    finally:
        gone.cancel()
        result.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
