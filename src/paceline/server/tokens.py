"""/tokenize and /detokenize: how this model cuts text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response

from paceline.engine.build import LoadedModel
from paceline.engine.checks import check_ids
from paceline.server.body import is_short, read_body
from paceline.server.conversation import encode_conversation
from paceline.server.errors import ApiError
from paceline.server.reasoning import variables_of
from paceline.server.schema import parse
from paceline.server.tools import Tools, tool_use


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text, or a conversation as a chat would be encoded. vLLM's fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class TokenRoutes:
    """The tokenizer of one model, over HTTP."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    async def tokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, self._tokenized)

    async def detokenize(self, http: HttpRequest) -> Response:
        return await self._answer(http, self._detokenized)

    async def _answer(self, http: HttpRequest, work: Callable[[bytes], bytes]) -> Response:
        body = await read_body(http)
        answer = work(body) if is_short(body) else await asyncio.to_thread(work, body)
        return Response(answer, media_type="application/json")

    def _tokenized(self, body: bytes) -> bytes:
        request = parse(body, TokenizeRequest)
        self._check_model(request.model)
        ids = self._encode(request)
        text = self._loaded.tokenizer.token_text
        answer = {
            "count": len(ids),
            "max_model_len": self._loaded.config.max_model_len,
            "tokens": ids,
            "token_strs": [text(i) for i in ids] if request.return_token_strs else None,
        }
        return msgspec.json.encode(answer)

    def _detokenized(self, body: bytes) -> bytes:
        request = parse(body, DetokenizeRequest)
        self._check_model(request.model)
        tokenizer = self._loaded.tokenizer
        check_ids(request.tokens, param="tokens", num_ids=tokenizer.vocab_size)
        return msgspec.json.encode({"prompt": tokenizer.decode(request.tokens, skip_special=False)})

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "send prompt or messages, one of them", param="prompt")
        if request.messages is not None:
            if request.add_special_tokens is not None:
                raise ApiError(
                    400, "the chat template decides on special tokens: leave it out",
                    param="add_special_tokens",
                )  # fmt: skip
            use = tool_use(request.tools, None, None)
            tools = use.objects if use else ()
            template = "" if self._loaded.template is None else self._loaded.template.source
            variables = variables_of(request.chat_template_kwargs, template)
            return encode_conversation(
                self._loaded, request.messages, tools=tools, variables=variables
            )
        if request.tools is not None:
            raise ApiError(400, "tools need messages", param="tools")
        if request.chat_template_kwargs is not None:
            raise ApiError(
                400, "chat_template_kwargs need messages", param="chat_template_kwargs"
            )  # fmt: skip
        assert request.prompt is not None
        if request.add_special_tokens is False:
            return self._loaded.tokenizer.encode(request.prompt, add_special=False)
        return self._loaded.encode_prompt(request.prompt)

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self._loaded)


class Named(Protocol):
    """A model under the names that clients call it by."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


def check_model(name: str, served: Named) -> None:
    """Raise ApiError 404 unless `name` is the model that is served."""
    if name != served.name and name not in served.aliases:
        raise ApiError(
            404, f"the model {name[:200]!r} is not served here: ask for {served.name!r}",
            param="model", code="model_not_found",
        )  # fmt: skip
