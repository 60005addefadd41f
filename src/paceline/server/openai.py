"""What clients get: OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from paceline.completion import Choice
from paceline.errors import PacelineError
from paceline.server.dialect import ApiRequest, Frame, PieceReader
from paceline.server.errors import ApiError, error_body
from paceline.server.schema import ChatRequest, CompletionRequest, parse
from paceline.server.sse import DONE, event
from paceline.server.tools import message_fields, piece_delta
from paceline.types import Delta, FinishReason, TokenLogprob, Usage

Endpoint = Literal["chat", "completion"]

_encode = msgspec.json.Encoder().encode
_LOWEST_LOGPROB = -9999.0  # what OpenAI sends for a probability of zero; JSON has no infinity


class TokenTexts(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes: ...


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


def _finish_reason(reason: FinishReason | None, reader: PieceReader) -> str | None:
    """A cut answer stays "length", whatever calls it holds."""
    return "tool_calls" if reason == "stop" and reader.has_only_whole_calls else reason


class Formatter:
    """A Writer of chat completions and of completions.

    `prefixes`, one a choice, are written before the texts. With `num_prompt_tokens` every chunk
    has the usage so far. `new_reader` makes what reads a choice as thoughts,
    words and calls; None: all is words. `figures` are
    asked for when the usage is written, and go with it as `usage.paceline`.
    """

    quiet_s: float | None = None

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        answer_id: str,
        model: str,
        tokenizer: TokenTexts,
        wants_logprobs: bool,
        include_usage: bool = False,
        num_prompt_tokens: int | None = None,
        prefixes: Sequence[str] = (),
        new_reader: Callable[[], PieceReader] | None = None,
        reasons: bool = False,
        figures: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._is_chat = endpoint == "chat"
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._include_usage = include_usage
        self._figures = figures
        self._new_reader = new_reader
        self._reasons = reasons
        self._readers: dict[int, PieceReader] = {}
        self._prefixes = prefixes
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._offsets: dict[int, int] = {}  # choice -> characters of the tokens so far
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        # All of a chunk but its choice is the same in every chunk: it is encoded once.
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = _encode({**self._head, "object": kind})[:-1]
        self._chunk_head = head + b',"choices":[{"index":'
        self._chunk_tail = b'}],"usage":null}' if include_usage else b"}]}"
        if num_prompt_tokens is not None:
            self._count(0)

    def whole(self, choices: Sequence[Choice], n: int) -> bytes:
        """Return the JSON of a finished answer."""
        objects = []
        for index, choice in enumerate(choices):
            body: dict[str, Any] = {"index": index}
            finish_reason: str = choice.finish_reason
            if self._is_chat:
                body["message"], finish_reason = self._message(index, choice)
            else:
                body["text"] = (self._prefixes[index] if self._prefixes else "") + choice.text
            scores = choice.prompt_logprobs + (choice.logprobs or ())
            body["logprobs"] = self._logprobs(index, scores)
            body["finish_reason"] = finish_reason
            objects.append(body)
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage = self._usage([choice.usage for choice in choices], n)
        return _encode({**self._head, "object": kind, "choices": objects, "usage": usage})

    def opening(self, num_choices: int) -> bytes:
        """Return the chunks that come first: a role for each choice of a chat, else a prefix."""
        if not self._is_chat:
            texts = [b'"text":' + _encode(prefix) for prefix in self._prefixes]
            return b"".join(self._chunk(index, text, b"null") for index, text in enumerate(texts))
        delta = b'"delta":{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, delta, b"null") for index in range(num_choices))

    def chunks(self, index: int, delta: Delta) -> bytes:
        """Return the chunks of a delta: its text if any, then its end if it is the last."""
        written = b""
        if self._num_prompt_tokens is not None:
            self._count(len(delta.token_ids))
        finish_reason: str | None = delta.finish_reason
        if self._new_reader is not None:
            written, finish_reason = self._read(index, delta)
        elif delta.text or (self._wants_logprobs and (delta.logprobs or delta.prompt_logprobs)):
            text = _encode(delta.text)
            body = b'"delta":{"content":' + text + b"}" if self._is_chat else b'"text":' + text
            written = self._chunk(index, body, b"null", delta.prompt_logprobs + delta.logprobs)
        if finish_reason is not None:
            body = b'"delta":{}' if self._is_chat else b'"text":""'
            written += self._chunk(index, body, _encode(finish_reason))
        return written

    def _read(self, index: int, delta: Delta) -> tuple[bytes, str | None]:
        """Return the chunks of an answer that is read, and why it ends if it does."""
        reader = self._reader(index)
        pieces = reader.read(delta.text, delta.finish_reason, delta.token_ids)
        deltas = [piece_delta(piece) for piece in pieces]
        if not deltas and self._wants_logprobs and delta.logprobs:
            deltas = [{"content": ""}]  # held back, but its scores are not
        written = b""
        for i, fields in enumerate(deltas):
            scores = delta.logprobs if i == 0 else ()
            written += self._chunk(index, b'"delta":' + _encode(fields), b"null", scores)
        return written, _finish_reason(delta.finish_reason, reader)

    def _reader(self, index: int) -> PieceReader:
        assert self._new_reader is not None
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._new_reader()
        return reader

    def _message(self, index: int, choice: Choice) -> tuple[dict[str, Any], str]:
        """Return the message of a finished choice, and why it ended."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._new_reader is None:
            return message, choice.finish_reason
        reader = self._reader(index)
        pieces = reader.read(choice.text, choice.finish_reason, choice.token_ids)
        message.update(message_fields(pieces))
        return message, _finish_reason(choice.finish_reason, reader) or choice.finish_reason

    def closing(self, usages: Sequence[Usage], n: int) -> bytes:
        """Return the end of the stream, before it the usage figures where they were asked for."""
        if not self._include_usage:
            return DONE
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = self._usage(usages, n)
        end = {**self._head, "object": kind, "choices": [], "usage": usage}
        return event(_encode(end)) + DONE

    def idle(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return event(_encode(error_body(error)))

    def _count(self, num_tokens: int) -> None:
        """Write the usage so far into the chunks to come."""
        self._num_completion_tokens += num_tokens
        prompt, completion = self._num_prompt_tokens or 0, self._num_completion_tokens
        counts = (prompt, completion, prompt + completion)
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts
        self._chunk_tail = b'}],"usage":' + usage + b"}"

    def _usage(self, usages: Sequence[Usage], n: int) -> dict[str, Any]:
        usage = usage_object(usages, n)
        if self._reasons:
            num_thought = sum(reader.num_thought for reader in self._readers.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
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
        own = self._tokenizer.token_bytes(token_id, skip_special=False)
        return {"token": text, "logprob": _floor(logprob), "bytes": list(own)}

    def _completion_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        offset = self._offsets.get(index, 0)
        for item in logprobs:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(item.token_id))
        self._offsets[index] = offset
        return {
            "tokens": [self._name(item.token_id) for item in logprobs],
            "token_logprobs": [_floor(item.logprob) if item.rank else None for item in logprobs],
            "top_logprobs": [self._top(item) if item.rank else None for item in logprobs],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens, and the chosen one where it is none of them.

        Two tokens may share a name: the likelier one keeps it.
        """
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(self._name(token_id), _floor(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text, of a part of a character its bytes, as OpenAI writes them."""
        own = self._tokenizer.token_bytes(token_id, skip_special=False)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


class OpenAIAsked(msgspec.Struct, frozen=True):
    """A call of /v1/chat/completions or /v1/completions."""

    request: ApiRequest

    @property
    def id_prefix(self) -> str:
        return "chatcmpl-" if isinstance(self.request, ChatRequest) else "cmpl-"

    @property
    def pins(self) -> bool:
        return False

    @property
    def background(self) -> None:
        return None

    @property
    def wants_objects(self) -> bool:
        return False

    def writer(self, frame: Frame) -> Formatter:
        options = self.request.stream_options
        counts_up = bool(options and options.continuous_usage_stats)
        wants_usage = bool(options and options.include_usage)
        return Formatter(
            "chat" if isinstance(self.request, ChatRequest) else "completion",
            answer_id=frame.answer_id,
            model=frame.model,
            tokenizer=frame.tokenizer,
            wants_logprobs=frame.params.logprobs is not None,
            include_usage=wants_usage or frame.figures is not None,
            num_prompt_tokens=frame.num_prompt_tokens if counts_up else None,
            prefixes=frame.prefixes,
            new_reader=(lambda: PieceReader(frame)) if frame.is_read else None,
            reasons=frame.opening is not None,
            figures=frame.figures,
        )

    def in_its_words(self, error: PacelineError) -> PacelineError:
        return error


def read_chat(body: bytes) -> OpenAIAsked:
    """Return a body of /v1/chat/completions, read. Raises ApiError."""
    return OpenAIAsked(parse(body, ChatRequest))


def read_completion(body: bytes) -> OpenAIAsked:
    """Return a body of /v1/completions, read. Raises ApiError."""
    return OpenAIAsked(parse(body, CompletionRequest))
