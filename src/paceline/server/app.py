"""The OpenAI API over HTTP: routes, limits and errors."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline import __version__
from paceline.completion import ChoiceBuilder
from paceline.engine.build import LoadedModel
from paceline.errors import PacelineError
from paceline.measure.ledger import Part
from paceline.server.calls import Call
from paceline.server.delivery import ClientGoneError, Generation, Outbox
from paceline.server.errors import ApiError, as_api_error, error_response
from paceline.server.openai import Formatter, model_object
from paceline.server.page.routes import add_page
from paceline.server.reports import Observer, Reports
from paceline.server.schema import (
    ChatRequest,
    CompletionRequest,
    parse,
    sampling_params,
    split_prompts,
)
from paceline.server.sse import DONE, EventStream
from paceline.server.timekeeping import CALL, Timekeeping
from paceline.server.timeline import engine_id, server_timing
from paceline.types import Request, SamplingParams, Usage

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
MAX_OPEN_CALLS = 1024  # calls being answered or waiting for it; more are told to come back
STOP_TIMEOUT_S = 5.0
# Parsing and tokenising a body up to this size takes well under a millisecond; a longer one goes
# to a thread, so that it does not hold up the streams of others.
_INLINE_BODY_BYTES = 4096

_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})

ApiRequest = ChatRequest | CompletionRequest
Prepared = tuple[ApiRequest, SamplingParams, list[list[int]]]  # and the prompts' ids


class Server:
    """Answers calls for one loaded model."""

    def __init__(self, loaded: LoadedModel, reports: Reports) -> None:
        self._loaded = loaded
        self._reports = reports
        self._created = int(time.time())
        self._outbox: Outbox | None = None
        self._num_open = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="paceline-text")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._outbox = Outbox(asyncio.get_running_loop())
        self._loaded.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._loaded.engine.stop, STOP_TIMEOUT_S)
            self._threads.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._reports.close)

    async def health(self) -> Response:
        stats = self._loaded.engine.stats()
        body = {"status": "ok", "version": __version__, "model": self._loaded.name, "engine": stats}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def models(self) -> Response:
        body = {"object": "list", "data": [self._model()]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return Response(msgspec.json.encode(self._model()), media_type="application/json")

    def _model(self) -> dict[str, object]:
        max_model_len = self._loaded.config.max_model_len
        assert max_model_len is not None
        return model_object(self._loaded.name, self._created, max_model_len)

    def _check_model(self, name: str) -> None:
        if name != self._loaded.name:
            raise ApiError(
                404,
                f"the model {name!r} is not served here: ask for {self._loaded.name!r}",
                param="model",
                code="model_not_found",
            )

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_body(http)
        return await self._answer(http, body, self._prepare_chat)

    async def completions(self, http: HttpRequest) -> Response:
        body = await read_body(http)
        return await self._answer(http, body, self._prepare_completion)

    def _prepare_chat(self, body: bytes, call: Call) -> Prepared:
        request = parse(body, ChatRequest)
        params = self._params(request)
        call.lap(Part.PARSE)
        ids = self._loaded.encode_chat(
            request.messages, on_rendered=lambda: call.lap(Part.TEMPLATE)
        )
        call.lap(Part.TOKENISE)
        return request, params, [ids]

    def _prepare_completion(self, body: bytes, call: Call) -> Prepared:
        request = parse(body, CompletionRequest)
        params = self._params(request)
        prompts = split_prompts(request.prompt)
        call.lap(Part.PARSE)
        ids = [self._loaded.encode_prompt(p) if isinstance(p, str) else p for p in prompts]
        call.lap(Part.TOKENISE)
        return request, params, ids

    def _params(self, request: ApiRequest) -> SamplingParams:
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return sampling_params(request, self._loaded.default_params)

    async def _answer(
        self, http: HttpRequest, body: bytes, prepare: Callable[[bytes, Call], Prepared]
    ) -> Response:
        call: Call = http.scope["state"][CALL]
        call.request_id = request_id(http)
        call.traceparent = http.headers.get("traceparent", "")
        call.lap(Part.RECEIVE)
        if self._num_open >= MAX_OPEN_CALLS:
            raise ApiError(429, f"{MAX_OPEN_CALLS} calls are open: try again later")
        assert self._outbox is not None
        request, params, prompts = await self._prepare(prepare, body, call)
        wants_figures = self._wants_figures(request, http)
        options = request.stream_options
        is_chat = isinstance(request, ChatRequest)
        call.id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        formatter = Formatter(
            "chat" if is_chat else "completion",
            answer_id=call.id,
            model=self._loaded.name,
            tokenizer=self._loaded.tokenizer,
            wants_logprobs=params.logprobs is not None,
            include_usage=bool(options and options.include_usage) or wants_figures,
            figures=(lambda: call.figures(time.monotonic_ns())) if wants_figures else None,
        )
        arrival_ns = call.lap(Part.PARSE)
        requests = [
            Request(
                id=engine_id(call.id, idx),
                prompt_token_ids=tuple(prompt),
                params=params,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                arrival_ns=arrival_ns,
            )
            for idx, prompt in enumerate(prompts)
        ]
        generation = Generation(self._loaded.engine, self._outbox, requests, call)
        generation.submit()
        call.accepted(params, num_prompts=len(prompts), is_stream=bool(request.stream))
        headers = {
            "x-request-id": call.request_id,
            "server-timing": server_timing(call, call.mark_ns),
        }
        if request.stream:
            return EventStream(generation, self._stream(generation, formatter), headers)
        return await self._collect(http, generation, formatter, headers)

    def _wants_figures(self, request: ApiRequest, http: HttpRequest) -> bool:
        """Say whether the reply shall have `usage.paceline`: by field, or by header."""
        header = http.headers.get("x-paceline-timings", "false").lower()
        if header not in ("true", "false"):
            raise ApiError(400, f"x-paceline-timings is {header!r}: send true or false")
        is_wanted = header == "true" if request.timings is None else request.timings
        if is_wanted and self._loaded.recorder is None:
            raise ApiError(
                400, "this server runs with --no-ledger: leave out timings", param="timings"
            )
        return is_wanted

    async def _prepare(
        self, prepare: Callable[[bytes, Call], Prepared], body: bytes, call: Call
    ) -> Prepared:
        if len(body) <= _INLINE_BODY_BYTES:
            return prepare(body, call)

        def work() -> Prepared:
            call.lap(Part.HANDOFF)
            return prepare(body, call)

        prepared = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        call.lap(Part.HANDOFF)
        return prepared

    async def _stream(
        self, generation: Generation, formatter: Formatter
    ) -> AsyncGenerator[bytes, None]:
        usages: dict[int, Usage] = {}
        self._num_open += 1
        try:
            if opening := formatter.opening(generation.num_choices):
                yield opening
            async for burst in generation.bursts():
                usages.update({idx: delta.usage for idx, delta in burst if delta.usage is not None})
                if data := b"".join(formatter.chunks(idx, delta) for idx, delta in burst):
                    yield data
                    if any(delta.text for _, delta in burst):
                        generation.call.wrote_content()
            in_order = [usages[idx] for idx in sorted(usages)]
            yield formatter.closing(in_order, generation.n) + DONE
        finally:
            self._num_open -= 1

    async def _collect(
        self,
        http: HttpRequest,
        generation: Generation,
        formatter: Formatter,
        headers: dict[str, str],
    ) -> Response:
        wants_logprobs = generation.requests[0].params.logprobs is not None
        builders = [ChoiceBuilder(idx, wants_logprobs) for idx in range(generation.num_choices)]
        self._num_open += 1
        try:
            async with generation.attended(http.receive):
                async for burst in generation.bursts():
                    for idx, delta in burst:
                        builders[idx].add(delta)
        except ClientGoneError:
            return Response(status_code=499)
        finally:
            self._num_open -= 1
        body = formatter.whole([builder.choice() for builder in builders], generation.n)
        headers["server-timing"] = server_timing(generation.call, time.monotonic_ns())
        return Response(body, media_type="application/json", headers=headers)


async def read_body(http: HttpRequest) -> bytes:
    """Return the JSON body, at most MAX_BODY_BYTES long. Raises ApiError 413 or 415."""
    kind = http.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"content-type is {kind!r}: send application/json")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes: shorten it")
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body was complete") from None
    return b"".join(parts)


def request_id(http: HttpRequest) -> str:
    """Return the caller's X-Request-Id if it is a plain short one, else one that the call keeps."""
    call: Call | None = http.scope.get("state", {}).get(CALL)
    if call is not None and call.request_id:
        return call.request_id
    given = http.headers.get("x-request-id", "")
    is_plain = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    chosen = given if is_plain else uuid.uuid4().hex
    if call is not None:
        call.request_id = chosen
    return chosen


def create_app(
    loaded: LoadedModel, *, observers: Iterable[Observer] = (), page: bool = True
) -> FastAPI:
    """Return the ASGI app that serves `loaded`; its lifespan starts and stops the engine.

    The lifespan's end closes the observers, too. `page` says whether `GET /` is a page.
    """
    reports = Reports(loaded, observers)
    server = Server(loaded, reports)
    app = FastAPI(title="Paceline", version=__version__, lifespan=server.lifespan, docs_url=None,
                  redoc_url=None)  # fmt: skip
    for path, method, endpoint in (
        ("/health", "GET", server.health),
        ("/v1/models", "GET", server.models),
        ("/v1/models/{name:path}", "GET", server.model),
        ("/v1/chat/completions", "POST", server.chat),
        ("/v1/completions", "POST", server.completions),
        ("/v1/requests/{key}/timeline", "GET", reports.timeline),
        ("/v1/trace", "GET", reports.trace),
        ("/v1/paceline/live", "GET", reports.live),
        ("/metrics", "GET", reports.metrics),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    if page:
        add_page(app)
    app.add_middleware(Timekeeping, paths=_GENERATING, on_open=reports.open,
                       on_close=reports.add)  # fmt: skip

    @app.exception_handler(PacelineError)
    async def on_error(http: HttpRequest, error: PacelineError) -> Response:
        return error_response(as_api_error(error), {"x-request-id": request_id(http)})

    @app.exception_handler(HTTPException)
    async def on_http_error(http: HttpRequest, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return error_response(ApiError(error.status_code, message), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_bug(http: HttpRequest, error: Exception) -> Response:
        return error_response(ApiError(500, "the server failed on this request; its log says why"))

    return app
