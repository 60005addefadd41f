"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response

from paceline.engine.build import LoadedModel
from paceline.server.answers import Answers
from paceline.server.body import is_short, read_body, request_id
from paceline.server.conversation import encode_conversation
from paceline.server.dialect import own_words
from paceline.server.messages.translate import read_count, read_message
from paceline.server.reasoning import template_variables
from paceline.server.tokens import check_model
from paceline.server.tools import tool_use


class MessageRoutes:
    """The Messages API of one model. `answers` are those that all APIs share."""

    def __init__(self, loaded: LoadedModel, answers: Answers) -> None:
        self._loaded = loaded
        self._answers = answers

    async def create(self, http: HttpRequest) -> Response:
        response = await self._answers.answer(http, read_message)
        response.headers["request-id"] = request_id(http)
        return response

    async def count_tokens(self, http: HttpRequest) -> Response:
        """Count the tokens of a prompt, as `create` would: `input_tokens` with those cached."""
        body = await read_body(http)
        if is_short(body):
            num_tokens = self._count(body)
        else:
            num_tokens = await asyncio.to_thread(self._count, body)
        name = request_id(http)
        return Response(
            msgspec.json.encode({"input_tokens": num_tokens}),
            media_type="application/json",
            headers={"x-request-id": name, "request-id": name},
        )

    def _count(self, body: bytes) -> int:
        asked = read_count(body)
        with own_words(asked):
            request = asked.request
            check_model(request.model, self._loaded)
            template = "" if self._loaded.template is None else self._loaded.template.source
            variables = template_variables(request, template)
            use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
            objects = use.objects if use else ()
            ids = encode_conversation(
                self._loaded, request.messages, tools=objects, variables=variables
            )
            return len(ids)
