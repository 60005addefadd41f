"""MessageWriter: answers in the form of Anthropic's Messages API, whole and as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paceline.completion import Choice
from paceline.server.dialect import Frame, PieceReader
from paceline.server.errors import ApiError, anthropic_error_body
from paceline.server.messages.partial import whole_members
from paceline.server.sse import named_event
from paceline.text.reasoning import Thought
from paceline.text.tool_calls import CallBegun, Content, Piece
from paceline.types import Delta, FinishReason, Usage

SIGNATURE = "unsigned"  # clients want one, and send it back with the block
PING_S = 10.0  # proxies close streams that are silent for half a minute
_PING = named_event("ping", b'{"type":"ping"}')
_encode = msgspec.json.Encoder().encode


class MessageWriter:
    """A Writer of /v1/messages. In a stream each block is closed before the next is opened."""

    quiet_s: float | None = PING_S

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._reader = PieceReader(frame)
        self._end: dict[str, Any] = {}  # why the answer ended
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that is being written

    def whole(self, choices: Sequence[Choice], n: int) -> bytes:
        (choice,) = choices
        pieces = self._reader.read(choice.text, choice.finish_reason, choice.token_ids)
        end = self._ending(choice.finish_reason, choice.stop_reason, choice.usage)
        usage = self._usage(choice.usage)
        return _encode({**self._message(_blocks(pieces)), **end, "usage": usage})

    def opening(self, num_choices: int) -> bytes:
        # What was found in the cache is known when the answer ends, and said there.
        usage = _counts(self._frame.num_prompt_tokens, 0, 0)
        end = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._message([]), **end, "usage": usage})

    def chunks(self, index: int, delta: Delta) -> bytes:
        pieces = self._reader.read(delta.text, delta.finish_reason, delta.token_ids)
        written = b"".join(map(self._piece, pieces))
        if delta.finish_reason is None:
            return written
        assert delta.usage is not None
        self._end = self._ending(delta.finish_reason, delta.stop_reason, delta.usage)
        return written + self._close()

    def idle(self) -> bytes:
        return _PING

    def closing(self, usages: Sequence[Usage], n: int) -> bytes:
        (usage,) = usages
        end = _event("message_delta", delta=self._end, usage=self._usage(usage))
        return end + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", _encode(anthropic_error_body(error, None)))

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegun):
            return self._begin(_tool_use(piece.name))
        if isinstance(piece, Thought):
            begun = b"" if self._open == "thinking" else self._begin(_thinking(""))
            return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, Content):
            begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
            return begun + self._delta({"type": "text_delta", "text": piece.text})
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _begin(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = block["type"]
        self._num_blocks += 1
        index = self._num_blocks - 1
        return closed + _event("content_block_start", index=index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open = None
        return signed + _event("content_block_stop", index=self._num_blocks - 1)

    def _ending(self, reason: FinishReason, stop: str | int | None, usage: Usage) -> dict[str, Any]:
        """Return why an answer ended. A stop sequence is named, whatever calls come before it."""
        sequence = stop if isinstance(stop, str) else None
        if sequence is not None:
            why = "stop_sequence"
        elif reason != "length":
            why = "tool_use" if self._reader.has_only_whole_calls else "end_turn"
        else:
            has_all = usage.completion_tokens == self._frame.params.max_tokens
            why = "max_tokens" if has_all else "model_context_window_exceeded"
        return {"stop_reason": why, "stop_sequence": sequence}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._frame.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._frame.model,
            "content": content,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        counts = _counts(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        figures = self._frame.figures
        return counts if figures is None else {**counts, "paceline": figures()}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, _encode({"type": kind, **fields}))


def _counts(num_prompt: int, num_cached: int, num_output: int) -> dict[str, Any]:
    """Return the usage as Anthropic counts: input tokens are those that were in no cache."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }


def _thinking(text: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}


def _blocks(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return the content that all of `pieces` make."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}  # of the block at an index
    for piece in pieces:
        if isinstance(piece, CallBegun):
            blocks.append(_tool_use(piece.name))
        elif isinstance(piece, Thought):
            blocks.append(_thinking(piece.text, SIGNATURE))
        elif not isinstance(piece, Content):
            last = len(blocks) - 1
            arguments[last] = arguments.get(last, "") + piece.text
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += piece.text
        else:
            blocks.append({"type": "text", "text": piece.text})
    for idx, text in arguments.items():
        blocks[idx]["input"] = whole_members(text)
    return blocks
