"""Answers: calls that generate text, from their body to the last byte of the reply."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest
from msgspec import Struct
from starlette.responses import Response

from paceline.completion import Choice, ChoiceBuilder
from paceline.engine.build import LoadedModel
from paceline.errors import ParameterError
from paceline.measure.ledger import Part
from paceline.server.admission import Admission, Limits
from paceline.server.body import is_short, read_body, request_id
from paceline.server.calls import Call
from paceline.server.compiling import Compilers
from paceline.server.conversation import encode_conversation
from paceline.server.delivery import ClientGoneError, Generation, Outbox, Receive
from paceline.server.dialect import ApiRequest, Asked, Frame, Writer, own_words
from paceline.server.door import cache_salt, tenant
from paceline.server.errors import ApiError, as_api_error
from paceline.server.params import (
    check_num_choices,
    check_stream_options,
    deadline,
    priority,
    sampling_params,
    split_prompts,
    structured_field,
)
from paceline.server.reasoning import opening, reasoned, template_variables
from paceline.server.schema import ChatRequest, CompletionRequest
from paceline.server.sse import EventStream
from paceline.server.timekeeping import CALL
from paceline.server.timeline import engine_id, server_timing
from paceline.server.tokens import check_model
from paceline.server.tools import ToolUse, check_tools, compile_calls, tool_use
from paceline.text.reasoning import Opening
from paceline.text.tool_calls import ToolReader
from paceline.text.tools import tool_style
from paceline.types import Request, SamplingParams, Usage

if TYPE_CHECKING:
    from paceline.structured.grammar import Grammar

logger = logging.getLogger(__name__)

USES = "paceline_uses"  # in a call's state: an ExitStack that lets go of its model
MAX_OPEN_CALLS = 1024  # calls being answered or waiting for it; more are told to come back
STOP_TIMEOUT_S = 5.0

Read = Callable[[bytes], Asked]


class Prepared(Struct, frozen=True):
    """A call, ready to be submitted; `prompts` are token ids.

    `opening`: where the answers of a model that reasons begin.
    """

    asked: Asked
    params: SamplingParams
    prompts: list[list[int]]
    use: ToolUse | None = None
    opening: Opening | None = None


class Answers:
    """Answers calls for one loaded model, whose engine the caller starts and stops."""

    def __init__(self, loaded: LoadedModel, limits: Limits, *, num_tenants: int = 1) -> None:
        self._loaded = loaded
        self._admission = Admission(limits, num_tenants=num_tenants)
        self._outbox: Outbox | None = None
        self._num_open = 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="paceline-text")
        self._compilers = Compilers()

    def start(self) -> None:
        """Take calls from now on. For the event loop's thread."""
        self._outbox = Outbox(asyncio.get_running_loop())

    def close(self) -> None:
        """End the threads; what they have not begun is left."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()

    async def answer(
        self, http: HttpRequest, read: Read, *, is_quick: Callable[[bytes], bool] = is_short
    ) -> Response:
        """Answer a call whose body `read` understands; where `is_quick`, on the event loop."""
        body = await read_body(http)
        call: Call = http.scope["state"][CALL]
        call.request_id = request_id(http)
        call.traceparent = http.headers.get("traceparent", "")
        call.lap(Part.RECEIVE)
        if self._num_open >= MAX_OPEN_CALLS:
            raise ApiError(
                429, f"{MAX_OPEN_CALLS} calls are open: try again later",
                retry_after_s=self._admission.predict_s(tenant=tenant(http.scope)) or 1.0,
            )  # fmt: skip
        self._num_open += 1
        try:
            prepared = await self._prepare(read, body, call, is_quick=is_quick(body))
            with own_words(prepared.asked):
                return await self._answer(http, prepared, call)
        finally:
            self._num_open -= 1

    def _read(self, read: Read, body: bytes, call: Call) -> Prepared:
        """Return a body as parameters and the ids of its prompts."""
        asked = read(body)
        with own_words(asked):
            request = asked.request
            call.asked_for(request.model)
            check_model(request.model, self._loaded)
            check_stream_options(request)
            params = sampling_params(request, self._loaded.default_params)
            if isinstance(request, ChatRequest):
                use = tool_use(
                    request.tools, request.tool_choice, request.parallel_tool_calls,
                    wants_objects=asked.wants_objects,
                )  # fmt: skip
                ids = self._encode_chat(request, use, call)
                return Prepared(asked, params, [ids], use, opening(self._loaded, ids))
            return Prepared(asked, params, self._encode_prompts(request, params.n, call))

    def _encode_chat(self, request: ChatRequest, use: ToolUse | None, call: Call) -> list[int]:
        template = "" if self._loaded.template is None else self._loaded.template.source
        variables = template_variables(request, template)
        call.lap(Part.PARSE)
        ids = encode_conversation(
            self._loaded,
            request.messages,
            tools=use.objects if use else (),
            variables=variables,
            on_rendered=lambda: call.lap(Part.TEMPLATE),
        )
        call.lap(Part.TOKENISE)
        return ids

    def _encode_prompts(self, request: CompletionRequest, n: int, call: Call) -> list[list[int]]:
        prompts = split_prompts(request.prompt)
        check_num_choices(len(prompts), n)
        call.lap(Part.PARSE)
        ids = [self._loaded.encode_prompt(p) if isinstance(p, str) else p for p in prompts]
        call.lap(Part.TOKENISE)
        return ids

    async def _answer(self, http: HttpRequest, prepared: Prepared, call: Call) -> Response:
        assert self._outbox is not None
        asked, params, prompts = prepared.asked, prepared.params, prepared.prompts
        request = asked.request
        grammar = await self._compile(prepared, call)
        if isinstance(request, ChatRequest):
            grammar = reasoned(self._loaded, grammar, prepared.opening, request)
        wants_figures = self._wants_figures(request, http)
        call.id = asked.id_prefix + uuid.uuid4().hex
        writer = asked.writer(self._frame(prepared, call, wants_figures=wants_figures))
        arrival_ns = call.lap(Part.PARSE)
        salt = cache_salt(http.scope, request.cache_salt)
        requests = [
            Request(
                id=engine_id(call.id, idx),
                prompt_token_ids=tuple(prompt),
                params=params,
                priority=priority(request),
                cache_salt=salt,
                tenant=tenant(http.scope),
                pin=call.id if asked.pins else "",
                arrival_ns=arrival_ns,
                grammar=grammar,
            )
            for idx, prompt in enumerate(prompts)
        ]
        generation = Generation(
            self._loaded.engine, self._outbox, requests, call, admission=self._admission,
            deadline=deadline(request, http.headers.get("x-request-deadline-ms"), call),
            names={"structured": _structure(prepared)},
        )  # fmt: skip
        generation.submit()
        call.accepted(params, num_prompts=len(prompts), is_stream=bool(request.stream))
        headers = {
            "x-request-id": call.request_id,
            "server-timing": server_timing(call, call.mark_ns),
        }
        if asked.background is not None:
            uses = http.scope["state"][USES].pop_all()
            return self._leave(asked, generation, writer=writer, headers=headers, uses=uses)
        if request.stream:
            events = self._stream(generation, writer)
            return EventStream(
                generation, events, headers,
                failure=lambda error: writer.failure(as_api_error(asked.in_its_words(error))),
            )  # fmt: skip
        return await self._collect(http, generation, writer, headers)

    def _frame(self, prepared: Prepared, call: Call, *, wants_figures: bool) -> Frame:
        request, prompts = prepared.asked.request, prepared.prompts
        return Frame(
            answer_id=call.id,
            model=self._loaded.name,
            tokenizer=self._loaded.tokenizer,
            params=prepared.params,
            num_prompt_tokens=sum(map(len, prompts)),
            prefixes=self._prefixes(request, prompts, prepared.params),
            new_reader=self._new_reader(prepared.use),
            opening=prepared.opening,
            figures=(lambda: call.figures(time.monotonic_ns())) if wants_figures else None,
        )

    async def _compile(self, prepared: Prepared, call: Call) -> Grammar | None:
        """Return the grammar of a structured answer. It is made on a thread of its own."""
        request, params, use = prepared.asked.request, prepared.params, prepared.use
        tools = request.tools or () if isinstance(request, ChatRequest) else ()
        if params.structured is None and not tools:
            return None

        def work() -> Grammar | None:
            grammars, template = self._loaded.grammars, self._loaded.template
            check_tools(tools, grammars)
            if use is None or template is None:
                return self._loaded.grammar(params)
            return compile_calls(use, params.structured, template.source, grammars)

        call.lap(Part.PARSE)
        try:
            grammar = await self._compilers.run(work, param=_structure(prepared))
        except ParameterError as error:
            raise ApiError(400, str(error), param=structured_field(request)) from None
        call.lap(Part.GRAMMAR)
        return grammar

    def _new_reader(self, use: ToolUse | None) -> Callable[[], ToolReader] | None:
        """Return what makes the readers of answers that may hold calls; None if none may."""
        template = self._loaded.template
        if use is None or template is None:
            return None
        style, names = tool_style(template.source), use.names
        return lambda: ToolReader(style, names, max_calls=use.max_calls, is_bound=use.must_call)

    def _prefixes(
        self, request: ApiRequest, prompts: list[list[int]], params: SamplingParams
    ) -> list[str]:
        """Return what each choice's text begins with: with `echo`, its prompt."""
        if isinstance(request, ChatRequest) or not request.echo:
            return []
        decode = self._loaded.tokenizer.decode
        given = split_prompts(request.prompt)
        texts = [p if isinstance(p, str) else decode(p, skip_special=False) for p in given]
        return [text for text in texts for _ in range(params.n)]

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

    async def _prepare(self, read: Read, body: bytes, call: Call, *, is_quick: bool) -> Prepared:
        if is_quick:
            return self._read(read, body, call)

        def work() -> Prepared:
            call.lap(Part.HANDOFF)
            return self._read(read, body, call)

        prepared = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        call.lap(Part.HANDOFF)
        return prepared

    async def _stream(self, generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
        usages: dict[int, Usage] = {}
        self._num_open += 1
        try:
            if opening := writer.opening(generation.num_choices):
                yield opening
            async for burst in generation.bursts(quiet_s=writer.quiet_s):
                if not burst:
                    yield writer.idle()
                    continue
                usages.update({idx: delta.usage for idx, delta in burst if delta.usage is not None})
                if data := b"".join(writer.chunks(idx, delta) for idx, delta in burst):
                    yield data
                    if any(delta.text for _, delta in burst):
                        generation.call.wrote_content()
            in_order = [usages[idx] for idx in sorted(usages)]
            yield writer.closing(in_order, generation.n)
        finally:
            self._num_open -= 1

    async def _collect(
        self,
        http: HttpRequest,
        generation: Generation,
        writer: Writer,
        headers: dict[str, str],
    ) -> Response:
        try:
            choices = await _choices(generation, http.receive)
        except ClientGoneError:
            return Response(status_code=499)
        body = writer.whole(choices, generation.n)
        headers["server-timing"] = server_timing(generation.call, time.monotonic_ns())
        return Response(body, media_type="application/json", headers=headers)

    def _leave(
        self,
        asked: Asked,
        generation: Generation,
        *,
        writer: Writer,
        headers: dict[str, str],
        uses: ExitStack,
    ) -> Response:
        """Leave the answer to the background, where the call counts as open and has its `uses`."""
        assert asked.background is not None

        async def made() -> None:
            self._num_open += 1
            try:
                with uses, own_words(asked):
                    writer.whole(await _choices(generation, None), generation.n)
            finally:
                self._num_open -= 1

        async def told() -> AsyncGenerator[bytes, None]:
            stream = self._stream(generation, writer)
            with uses, own_words(asked):
                async with generation.attended(None), aclosing(stream) as events:
                    async for data in events:
                        yield data

        if not asked.request.stream:
            body = asked.background.begin(writer, generation, made())
            return Response(body, media_type="application/json", headers=headers)
        followed = asked.background.stream(writer, generation, told())
        return EventStream(followed, followed.events(), headers, failure=followed.failure)


async def _choices(generation: Generation, receive: Receive | None) -> list[Choice]:
    """Return all choices when they have ended. Raises what `bursts` does."""
    wants_logprobs = generation.requests[0].params.logprobs is not None
    builders = [ChoiceBuilder(idx, wants_logprobs) for idx in range(generation.num_choices)]
    async with generation.attended(receive):
        async for burst in generation.bursts():
            for idx, delta in burst:
                builders[idx].add(delta)
    return [builder.choice() for builder in builders]


def _structure(prepared: Prepared) -> str:
    """Return the name of the field that the structure of the answers comes from."""
    if prepared.params.structured is None:
        return "tools"
    return structured_field(prepared.asked.request)
