"""What clients get: OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from paceline.completion import Choice
from paceline.server.sse import event
from paceline.types import Delta, TokenLogprob, Usage

Endpoint = Literal["chat", "completion"]

_encode = msgspec.json.Encoder().encode
_LOWEST_LOGPROB = -9999.0  # what OpenAI sends for a probability of zero; JSON has no infinity


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_text(self, token_id: int) -> str: ...


def usage_object(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """Return the usage of all choices; each prompt counts once, whatever `n` is."""
    prompts = usages[::n]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
    }


def model_object(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "max_model_len": max_model_len,
    }


def _floor(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class Formatter:
    """Writes the answer to one call: `whole`, or in chunks by `opening`, `chunks`, `closing`.

    `figures` are asked for when the usage is written, and go with it as `usage.paceline`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        answer_id: str,
        model: str,
        tokenizer: TokenTexts,
        wants_logprobs: bool,
        include_usage: bool = False,
        figures: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._is_chat = endpoint == "chat"
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._include_usage = include_usage
        self._figures = figures
        self._offsets: dict[int, int] = {}  # choice -> characters of the tokens so far
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        # All of a chunk but its choice is the same in every chunk: it is encoded once.
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = _encode({**self._head, "object": kind})[:-1]
        self._chunk_head = head + b',"choices":[{"index":'
        self._chunk_tail = b'}],"usage":null}' if include_usage else b"}]}"

    def whole(self, choices: Sequence[Choice], n: int) -> bytes:
        """Return the JSON of a finished answer."""
        objects = []
        for index, choice in enumerate(choices):
            body: dict[str, Any] = {"index": index}
            if self._is_chat:
                body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                body["text"] = choice.text
            body["logprobs"] = self._logprobs(index, choice.logprobs or ())
            body["finish_reason"] = choice.finish_reason
            objects.append(body)
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage = self._usage([choice.usage for choice in choices], n)
        return _encode({**self._head, "object": kind, "choices": objects, "usage": usage})

    def opening(self, num_choices: int) -> bytes:
        """Return the chunks that come first: a role for each choice of a chat."""
        if not self._is_chat:
            return b""
        delta = b'"delta":{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, delta, b"null") for index in range(num_choices))

    def chunks(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of a delta: its text if any, then its end if it is the last."""
        written = b""
        if delta.text or (self._wants_logprobs and delta.logprobs):
            text = _encode(delta.text)
            body = b'"delta":{"content":' + text + b"}" if self._is_chat else b'"text":' + text
            written = self._chunk(index, body, b"null", delta.logprobs)
        if delta.finish_reason is not None:
            body = b'"delta":{}' if self._is_chat else b'"text":""'
            written += self._chunk(index, body, _encode(delta.finish_reason))
        return written

    def closing(self, usages: Sequence[Usage], n: int) -> bytes:
        """Return the chunk of usage figures where it was asked for."""
        if not self._include_usage:
            return b""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = self._usage(usages, n)
        return event(_encode({**self._head, "object": kind, "choices": [], "usage": usage}))

    def _usage(self, usages: Sequence[Usage], n: int) -> dict[str, Any]:
        usage = usage_object(usages, n)
        return usage if self._figures is None else {**usage, "paceline": self._figures()}

    def _chunk(
        self, index: int, body: bytes, finish: bytes, logprobs: Sequence[TokenLogprob] = ()
    ) -> bytes:
        scores = b"null"
        if self._wants_logprobs and logprobs:
            scores = _encode(self._logprobs(index, logprobs))
        choice = b'%d,%b,"logprobs":%b,"finish_reason":%b' % (index, body, scores, finish)
        return event(self._chunk_head + choice + self._chunk_tail)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        if self._is_chat:
            return {"content": [self._chat_logprob(item) for item in logprobs], "refusal": None}
        return self._completion_logprobs(index, logprobs)

    def _chat_logprob(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._scored(token_id, logprob) for token_id, logprob in item.top]
        return {**self._scored(item.token_id, item.logprob), "top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": _floor(logprob), "bytes": list(text.encode())}

    def _completion_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._tokenizer.token_text(item.token_id) for item in logprobs]
        offsets = []
        offset = self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_floor(item.logprob) for item in logprobs],
            "top_logprobs": [self._top(item) for item in logprobs],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Two tokens may share a text (partial UTF-8): the likelier one keeps it."""
        top: dict[str, float] = {}
        for token_id, logprob in item.top:
            top.setdefault(self._tokenizer.token_text(token_id), _floor(logprob))
        return top
