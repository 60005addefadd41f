"""Target: a server under test, and how it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from paceline.bench.answer import as_text, error_text, read_json, redirection
from paceline.bench.conversation import Message, Turn
from paceline.bench.http import ConnectionBrokenError, Origin, request_bytes, send
from paceline.errors import PacelineError, ParameterError

Endpoint = Literal["chat", "completions"]
ROUTES: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}
_PROBE_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 16 << 20
_encode = msgspec.json.Encoder().encode


class TargetError(PacelineError):
    """A server cannot be reached or does not answer as an OpenAI server does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`fields` go into every request as they are, over those of the bench; None leaves one out.
    `ignores_eos` adds ignore_eos."""

    name: str
    origin: Origin
    model: str
    endpoint: Endpoint = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    ignores_eos: bool = False

    def request(self, turn: Turn, messages: Sequence[Message]) -> bytes:
        """Return the HTTP request that asks for `turn` after the messages before it."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = messages
        else:
            body["prompt"] = "\n\n".join(as_text(message["content"]) for message in messages)
        if turn.max_tokens is not None:
            body["max_tokens"] = turn.max_tokens
        if self.ignores_eos:
            body["ignore_eos"] = True
        body.update(turn.fields)
        body.update(self.fields)
        body = {name: value for name, value in body.items() if value is not None}
        headers = {**self.headers, "Accept": "text/event-stream"}
        return request_bytes(self.origin, "POST", ROUTES[self.endpoint], headers, _encode(body))


def parse_target(text: str) -> tuple[str, str]:
    """Split "name=URL" into its parts; without a name the URL's host and port are it."""
    name, equals, url = text.partition("=")
    if not equals or "/" in name or ":" in name:
        try:
            place = urlsplit(text if "://" in text else f"http://{text}").netloc
        except ValueError as error:
            raise ParameterError(
                f"--target is {text!r}, which is no URL ({error}): write http://host:port"
            ) from None
        return place or text, text
    if not name or not url:
        raise ParameterError(f"--target is {text!r}: write URL or name=URL")
    return name, url


async def find_model(origin: Origin, headers: Mapping[str, str]) -> str:
    """Return the first model that the server lists. Raises TargetError with the remedy."""
    body = await get_json(origin, "/models", headers)
    try:
        return str(body["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TargetError(f"{origin.url}/models lists no model: name one with --model") from None


async def get_json(origin: Origin, route: str, headers: Mapping[str, str]) -> Any:
    answer = _Body()
    request = request_bytes(origin, "GET", route, dict(headers))
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await send(origin, request, answer)
    except (ConnectionBrokenError, TimeoutError) as error:
        raise TargetError(
            f"{origin.url} does not answer ({str(error) or 'timed out'}): start the server, or "
            "check the address"
        ) from None
    content = read_json(b"".join(answer.parts))
    if answer.status != 200 or content is None:
        what = redirection(answer.status, answer.headers) or error_text(content) or "no JSON"
        raise TargetError(
            f"{origin.url}{route} answers {answer.status} ({what}): name the model with --model, "
            "and check the address and --api-key"
        )
    return content


class _Body:
    """A whole body (an http.Sink)."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self._num_bytes = 0

    def on_connected(self, now: float) -> None:
        pass

    def on_head(self, status: int, headers: dict[str, str], now: float) -> None:
        self.status = status
        self.headers = headers

    def on_body(self, data: bytes, now: float) -> bool:
        self.parts.append(data)
        self._num_bytes += len(data)
        return self._num_bytes <= _MAX_BODY_BYTES  # what is cut is no JSON
