"""/v1/cache/prefixes: beginnings of prompts that are computed ahead, and pinned where asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
from fastapi import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from paceline.completion import Choice
from paceline.engine.build import LoadedModel
from paceline.errors import PacelineError, ParameterError
from paceline.server.answers import Answers
from paceline.server.conversation import encode_conversation
from paceline.server.dialect import Frame
from paceline.server.door import cache_salt, tenant
from paceline.server.errors import ApiError
from paceline.server.openai import Formatter
from paceline.server.schema import CompletionRequest, parse
from paceline.server.timekeeping import CALL
from paceline.server.tokens import check_model
from paceline.server.tools import Tools, tool_use

_KEPT_S = 3600.0  # that a call is remembered which left no pin: it may be on its way


class PrefixRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or how a conversation begins."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    pin: bool = False
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=86_400_000)] | None = None


class _Entry(msgspec.Struct):
    """A call that was to pin something, whose it was, what, and what it was told."""

    owner: str
    prefix: bytes  # a hash of its tokens and its salt
    since_s: float
    told: dict[str, Any]


class PrefixAsked(msgspec.Struct, frozen=True):
    """A body of POST /v1/cache/prefixes: a completion of one token, which nobody is told."""

    request: CompletionRequest
    given: PrefixRequest
    owner: str
    prefix: bytes
    known_pin: str | None  # that holds the same already
    routes: PrefixRoutes

    @property
    def id_prefix(self) -> str:
        return "prefix-"

    @property
    def pins(self) -> bool:
        return self.given.pin and self.known_pin is None

    @property
    def background(self) -> None:
        return None

    @property
    def wants_objects(self) -> bool:
        return False

    def writer(self, frame: Frame) -> PrefixWriter:
        return PrefixWriter(self, frame)

    def in_its_words(self, error: PacelineError) -> PacelineError:
        if self.given.messages is not None and getattr(error, "param", None) == "prompt":
            return ApiError(400, str(error), param="messages")
        return error


def no_pin(name: str) -> ApiError:
    return ApiError(404, f"there is no pin {name!r}", param="id", code="pin_not_found")


class PrefixWriter(Formatter):
    """Writes what became of a prefix, never in a stream."""

    def __init__(self, asked: PrefixAsked, frame: Frame) -> None:
        super().__init__(
            "completion", answer_id=frame.answer_id, model=frame.model, tokenizer=frame.tokenizer,
            wants_logprobs=False,
        )  # fmt: skip
        self._asked = asked
        self._id = asked.known_pin or frame.answer_id
        self._told: dict[str, Any] = {
            "id": self._id,
            "object": "cache.prefix",
            "created": int(time.time()),
            "model": frame.model,
            "prompt_tokens": frame.num_prompt_tokens,
        }
        if asked.pins:
            entry = _Entry(asked.owner, asked.prefix, time.monotonic(), self._told)
            asked.routes.expect(entry)

    def whole(self, choices: Sequence[Choice], n: int) -> bytes:
        self._told["cached_tokens"] = choices[0].usage.cached_tokens
        self._told["pinned_tokens"] = self._asked.routes.pinned_tokens(self._id)
        return msgspec.json.encode(self._told)


class PrefixRoutes:
    """Computes prefixes ahead, and keeps the book of pins. Used by the event loop's thread."""

    def __init__(self, loaded: LoadedModel, answers: Answers, *, num_tenants: int = 1) -> None:
        self._loaded = loaded
        self._answers = answers
        self._num_tenants = num_tenants
        self._entries: dict[str, _Entry] = {}

    async def create(self, http: HttpRequest) -> Response:
        return await self._answers.answer(http, partial(self._read, http.scope))

    def pinned(self, owner: str) -> list[dict[str, Any]]:
        """Return what `owner` has pinned."""
        pins = self._loaded.engine.pins()
        return [
            {**entry.told, "pinned_tokens": pins[name]}
            for name, entry in self._entries.items()
            if name in pins and entry.owner == owner
        ]

    def unpin(self, owner: str, name: str) -> bool:
        """Let a pin of `owner` go. Return whether it was there."""
        entry = self._entries.get(name)
        is_known = entry is not None and entry.owner == owner
        if not is_known or not self.pinned_tokens(name):
            return False
        del self._entries[name]
        self._loaded.engine.unpin(name)
        return True

    def pinned_tokens(self, name: str) -> int:
        return self._loaded.engine.pins().get(name, 0)

    def expect(self, entry: _Entry) -> None:
        """Enter a call that is to leave a pin, and forget those that have none any more."""
        pins, since_s = self._loaded.engine.pins(), entry.since_s - _KEPT_S
        for name, other in list(self._entries.items()):
            if name not in pins and other.since_s < since_s:
                del self._entries[name]
        self._entries[entry.told["id"]] = entry

    def _read(self, scope: Scope, body: bytes) -> PrefixAsked:
        owner, call = tenant(scope), scope["state"][CALL]
        given = parse(body, PrefixRequest)
        call.asked_for(given.model)
        check_model(given.model, self._loaded)
        ids = self._encode(given)
        prefix = blake2b(msgspec.json.encode([ids, given.cache_salt]), digest_size=16).digest()
        known = self._pin_of(owner, prefix) if given.pin else None
        if given.pin and known is None:
            self._check_pin(owner, ids, cache_salt(scope, given.cache_salt))
        request = CompletionRequest(
            model=given.model, prompt=ids, max_tokens=1, temperature=0.0, ignore_eos=True,
            cache_salt=given.cache_salt, priority=given.priority, deadline_ms=given.deadline_ms,
        )  # fmt: skip
        return PrefixAsked(request, given, owner, prefix, known, self)

    def _pin_of(self, owner: str, prefix: bytes) -> str | None:
        """Return the pin of `owner` that holds this prefix, if there is one."""
        pins = self._loaded.engine.pins()
        return next(
            (
                name
                for name, entry in self._entries.items()
                if name in pins and (entry.owner, entry.prefix) == (owner, prefix)
            ),
            None,
        )

    def _check_pin(self, owner: str, ids: list[int], salt: str) -> None:
        """Raise ApiError where there is nothing to pin, or this key's share is used up."""
        engine, block_size = self._loaded.engine, self._loaded.config.block_size
        if len(ids) < block_size:
            raise ApiError(
                400, f"the prompt has {len(ids)} tokens, and pins hold whole blocks of "
                f"{block_size}: there is nothing to pin", param="pin",
            )  # fmt: skip
        names = {name for name, entry in self._entries.items() if entry.owner == owner}
        own, more = engine.weigh_pin(ids, salt, names)
        share = engine.stats().num_blocks * block_size // 2 // self._num_tenants
        if self._num_tenants > 1 and own + more > share:
            raise ApiError(
                400, f"this key's pins hold {own} tokens, and {more} more are beyond its "
                f"share of {share}: unpin one, or raise --kv-memory", param="pin",
            )  # fmt: skip

    def _encode(self, given: PrefixRequest) -> list[int]:
        if (given.prompt is None) == (given.messages is None):
            raise ApiError(400, "send prompt or messages, one of them", param="prompt")
        if given.messages is None:
            if given.tools is not None:
                raise ApiError(400, "tools need messages", param="tools")
            assert given.prompt is not None
            return self._loaded.encode_prompt(given.prompt)
        if not given.messages:
            raise ApiError(
                400, "messages is empty: send at least one message, or a prompt", param="messages"
            )
        use = tool_use(given.tools, None, None)
        tools = use.objects if use else ()
        if given.messages[-1].get("role") == "user":
            return encode_conversation(self._loaded, given.messages, tools=tools)
        # What any next message has before it: templates tell only of whole conversations.
        first, second = (
            encode_conversation(
                self._loaded, [*given.messages, {"role": "user", "content": text}], tools=tools
            )
            for text in ("A", "0")
        )
        equal = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        if not equal:
            raise ParameterError("the conversation begins with its next message", param="messages")
        return first[:equal]
