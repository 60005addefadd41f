"""Shapes of answers, for the OpenAPI document: what clients may count on. More may be there."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """OpenAI's form of an error."""

    error: ErrorDetail


class MessageErrorDetail(Struct):
    type: str
    message: str


class MessageError(Struct):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | UnsetType = UNSET  # of a model that reasons


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class MessageAnswer(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(Struct):
    input_tokens: int


class ResponseAnswer(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class Deleted(Struct):
    id: str
    object: str
    deleted: Literal[True]


class ItemList(Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Struct):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: dict[str, int]


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    loaded: bool
    root: str | UnsetType = UNSET  # of an alias


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct):
    prompt: str


class Prefix(Struct):
    id: str
    object: Literal["cache.prefix"]
    created: int
    model: str
    prompt_tokens: int
    cached_tokens: int
    pinned_tokens: int


class PrefixList(Struct):
    object: Literal["list"]
    data: list[Prefix]


class Health(Struct):
    status: Literal["ok"]
    version: str


class Ready(Struct):
    status: Literal["ready"]


class Version(Struct):
    version: str
