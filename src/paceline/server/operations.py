"""The operations of the API, as its OpenAPI document tells them: bodies, answers, statuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from paceline.server import shapes
from paceline.server.embeddings import EmbeddingRequest
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.prefixes import PrefixRequest
from paceline.server.responses.schema import ResponseRequest
from paceline.server.schema import ChatRequest, CompletionRequest
from paceline.server.tokens import DetokenizeRequest, TokenizeRequest

STATUSES = {
    400: "The request is wrong: the message says which field, its value and the remedy.",
    401: "The API key is missing or unknown.",
    404: "What the path or the body names is not here.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is no application/json.",
    429: "Too much waits, or a deadline cannot be met: Retry-After says when to come back.",
    500: "The server failed.",
    503: "The server shuts down, a model cannot be loaded, or the call waited too long.",
    504: "The deadline has passed.",
}
_BODY = (400, 404, 408, 413, 415, 429, 500, 503)  # of every call with a body
_CALL = (*_BODY, 504)  # of every call that the model computes
_MODEL = {"type": "string"}  # a name; without one it is the first model's
_INTEGER = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


class Operation(Struct, frozen=True, kw_only=True):
    """A body of type `body` gets an `answer`, or one of `statuses` with an error.

    `answer` is a type, or the media type of what is no JSON. `query` has a schema for each
    parameter. With `streams` the answer comes as events where the body asks for them.
    """

    summary: str
    answer: type[Any] | str
    body: type[Struct] | None = None
    statuses: tuple[int, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = {}
    streams: bool = False


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("get", "/health"): Operation(summary="Whether the process lives", answer=shapes.Health),
    ("get", "/ready"): Operation(
        summary="Whether new calls are taken", answer=shapes.Ready, statuses=(503,)
    ),
    ("get", "/version"): Operation(summary="The server's version", answer=shapes.Version),
    ("post", "/tokenize"): Operation(
        summary="Text to token ids", body=TokenizeRequest, answer=shapes.Tokens,
        statuses=(*_BODY, 429, 503),
    ),
    ("post", "/detokenize"): Operation(
        summary="Token ids to text", body=DetokenizeRequest, answer=shapes.Text,
        statuses=(*_BODY, 429, 503),
    ),
    ("get", "/v1/models"): Operation(summary="The models served", answer=shapes.ModelList),
    ("get", "/v1/models/{name}"): Operation(
        summary="A model that is served", answer=shapes.Model, statuses=(404,)
    ),
    ("post", "/v1/chat/completions"): Operation(
        summary="The next message of a conversation", body=ChatRequest, answer=shapes.ChatAnswer,
        statuses=_CALL, streams=True,
    ),
    ("post", "/v1/completions"): Operation(
        summary="How texts go on", body=CompletionRequest, answer=shapes.CompletionAnswer,
        statuses=_CALL, streams=True,
    ),
    ("post", "/v1/messages"): Operation(
        summary="The next message, by Anthropic's API", body=MessageRequest,
        answer=shapes.MessageAnswer, statuses=_CALL, streams=True,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens a prompt has", body=CountRequest, answer=shapes.TokenCount,
        statuses=(*_BODY, 429, 503),
    ),
    ("post", "/v1/responses"): Operation(
        summary="A response, by OpenAI's Responses API", body=ResponseRequest,
        answer=shapes.ResponseAnswer, statuses=_CALL, streams=True,
    ),
    ("get", "/v1/responses/{response_id}"): Operation(
        summary="A response that is kept, or its events", answer=shapes.ResponseAnswer,
        statuses=(400, 404, 429),
        query={
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0},
            "include_obfuscation": {"type": "boolean"},
        },
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(
        summary="Forget a response", answer=shapes.Deleted, statuses=(404,)
    ),
    ("post", "/v1/responses/{response_id}/cancel"): Operation(
        summary="End a response in the background", answer=shapes.ResponseAnswer,
        statuses=(400, 404),
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        summary="What a response answered", answer=shapes.ItemList, statuses=(400, 404),
        query={
            "after": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
        },
    ),
    ("post", "/v1/cache/prefixes"): Operation(
        summary="Compute how prompts begin, ahead", body=PrefixRequest, answer=shapes.Prefix,
        statuses=_CALL,
    ),
    ("get", "/v1/cache/prefixes"): Operation(
        summary="The pins of this key", answer=shapes.PrefixList
    ),
    ("delete", "/v1/cache/prefixes/{name}"): Operation(
        summary="Let a pin go", answer=shapes.Deleted, statuses=(404,)
    ),
    ("get", "/v1/requests/{key}/timeline"): Operation(
        summary="Where the time of a call went", answer=dict[str, Any], statuses=(400, 404),
        query={"after_step": _INTEGER},
    ),
    ("get", "/v1/trace"): Operation(
        summary="The last steps and calls, for Perfetto", answer=dict[str, Any],
        statuses=(400, 404, 429),
        query={
            "last_s": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
            "model": _MODEL,
        },
    ),
    ("get", "/v1/paceline/live"): Operation(
        summary="The last minutes by the second", answer=dict[str, Any],
        statuses=(400, 404),
        query={"after_s": _INTEGER, "by": {"enum": ["wall", "ttft", "tpot"]}, "model": _MODEL},
    ),
    ("get", "/metrics"): Operation(
        summary="Prometheus' text format", answer="text/plain"
    ),
    ("post", "/v1/embeddings"): Operation(
        summary="Vectors of texts", body=EmbeddingRequest, answer=shapes.EmbeddingAnswer,
        statuses=_CALL,
    ),
}  # fmt: skip
