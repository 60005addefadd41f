"""ResponseWriter: answers in the form of OpenAI's Responses API, whole and as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from paceline.completion import Choice
from paceline.server.dialect import Frame, PieceReader
from paceline.server.errors import ApiError
from paceline.server.sse import named_event
from paceline.text.reasoning import Thought
from paceline.text.tool_calls import CallBegun, Content, Piece
from paceline.types import Delta, FinishReason, Usage

_encode = msgspec.json.Encoder().encode
Keep = Callable[[str, "bytes | None"], None]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class _Text(msgspec.Struct, frozen=True):
    """An item of text: what its id begins with, the type of its part, and what each has besides."""

    prefix: str
    name: str
    item: dict[str, Any]
    part: dict[str, Any]
    scores: dict[str, Any]  # of its events


_TEXTS = {
    "message": _Text(
        "msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []},
        {"logprobs": []},
    ),
    "reasoning": _Text("rs", "reasoning_text", {"summary": []}, {}, {}),
}  # fmt: skip


class ResponseWriter:
    """A Writer of /v1/responses. `echo` are fields that every response has as they were asked.

    In a stream each item is done before the next is added, and events are numbered; one in the
    background is queued at first. `keep` is called with the id and the JSON of the response when it
    is whole, and of one that is made in the background whenever its state changes; with None where
    it is to be forgotten.
    """

    quiet_s: float | None = None

    def __init__(self, frame: Frame, echo: Mapping[str, Any], *, keep: Keep) -> None:
        self._frame = frame
        self._echo = echo
        self._keep = keep
        self._reader = PieceReader(frame)
        self._created_at = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._is_queued = False  # its stream has not told of its begin
        self._is_open = False  # the last item of the output is being written
        self._is_cut = False
        self._num_events = 0

    def whole(self, choices: Sequence[Choice], n: int) -> bytes:
        (choice,) = choices
        self._write(choice.text, choice.finish_reason, choice.token_ids)
        return self._finished(choice.usage)[1]

    def opening(self, num_choices: int) -> bytes:
        self._is_queued = bool(self._echo.get("background"))
        status: Status = "queued" if self._is_queued else "in_progress"
        response = self._response(status, usage=None)
        kinds = ("response.created", f"response.{status}")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def chunks(self, index: int, delta: Delta) -> bytes:
        begun = b""
        if self._is_queued:
            self._is_queued = False
            response = self._response("in_progress", usage=None)
            begun = self._event("response.in_progress", response=response)
        return begun + self._write(delta.text, delta.finish_reason, delta.token_ids)

    def idle(self) -> bytes:
        return b""

    def closing(self, usages: Sequence[Usage], n: int) -> bytes:
        (usage,) = usages
        status, body = self._finished(usage)
        return self._event(f"response.{status}", response=msgspec.Raw(body))

    def failure(self, error: ApiError) -> bytes:
        return self.broken(error) + self._event("response.failed", response=self._failed(error))

    def broken(self, error: ApiError) -> bytes:
        """Return the event that says why no more will come."""
        return self._event("error", code=error.code, message=str(error), param=error.param)

    @property
    def response_id(self) -> str:
        return self._frame.answer_id

    def pending(self, status: Status) -> bytes:
        """Return the response as long as it has not ended: its state, and no output."""
        return _encode({**self._response(status, usage=None), "output": []})

    def keep_pending(self, status: Status) -> bytes:
        body = self.pending(status)
        self._keep(self.response_id, body)
        return body

    def give_up(self, error: ApiError | None) -> None:
        """Keep a response that ended without an answer: it failed, or was cancelled."""
        if error is None:
            self.keep_pending("cancelled")
        else:
            self._keep(self.response_id, _encode(self._failed(error)))

    def forget(self) -> None:
        self._keep(self.response_id, None)

    def _write(self, text: str, reason: FinishReason | None, token_ids: Sequence[int]) -> bytes:
        """Return the events of what is certain by now; with a reason, all up to the end."""
        written = b"".join(map(self._piece, self._reader.read(text, reason, token_ids)))
        if reason is None:
            return written
        self._is_cut = reason == "length"
        return written + self._close("incomplete" if self._is_cut else "completed")

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallBegun):
            return self._add(_call(piece.name))
        if isinstance(piece, Thought | Content):
            kind = "reasoning" if isinstance(piece, Thought) else "message"
            is_going_on = self._is_open and self._output[-1]["type"] == kind
            begun = b"" if is_going_on else self._begin(kind)
            self._output[-1]["content"][0]["text"] += piece.text
            text = _TEXTS[kind]
            return begun + self._on_part(
                f"response.{text.name}.delta", delta=piece.text, **text.scores
            )
        self._output[-1]["arguments"] += piece.text
        return self._on_item("response.function_call_arguments.delta", delta=piece.text)

    def _begin(self, kind: str) -> bytes:
        """Return the events that begin an item of text."""
        text = _TEXTS[kind]
        name = f"{text.prefix}_{uuid.uuid4().hex}"
        item = {"id": name, "type": kind, "status": "in_progress", **text.item, "content": []}
        begun = self._add(item)
        part = {"type": text.name, "text": "", **text.part}
        item["content"].append(part)
        return begun + self._on_part("response.content_part.added", part=part)

    def _add(self, item: dict[str, Any]) -> bytes:
        closed = self._close("completed")
        self._output.append(item)
        self._is_open = True
        index = len(self._output) - 1
        return closed + self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> bytes:
        """Return the events that end the item which is being written, if there is one."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        text = _TEXTS.get(item["type"])
        if text is not None:
            part = item["content"][0]
            done = self._on_part(f"response.{text.name}.done", text=part["text"], **text.scores)
            done += self._on_part("response.content_part.done", part=part)
        else:
            done = self._on_item(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        index = len(self._output) - 1
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _on_part(self, kind: str, **fields: Any) -> bytes:
        return self._on_item(kind, content_index=0, **fields)

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        item_id, index = self._output[-1]["id"], len(self._output) - 1
        return self._event(kind, item_id=item_id, output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event(kind, _encode({"type": kind, "sequence_number": number, **fields}))

    def _finished(self, usage: Usage) -> tuple[Status, bytes]:
        """Return the status of the answer and the response, and keep it."""
        status: Status = "incomplete" if self._is_cut else "completed"
        body = _encode(self._response(status, usage=self._usage(usage)))
        self._keep(self._frame.answer_id, body)
        return status, body

    def _failed(self, error: ApiError) -> dict[str, Any]:
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # OpenAI's codes
        detail = {"code": code, "message": str(error)}
        return {**self._response("failed", usage=None), "error": detail}

    def _response(self, status: Status, *, usage: dict[str, Any] | None) -> dict[str, Any]:
        params = self._frame.params
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._frame.answer_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._frame.model,
            "output": self._output,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": usage,
            **self._echo,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_thought},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        figures = self._frame.figures
        return counts if figures is None else {**counts, "paceline": figures()}


def _call(name: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid.uuid4().hex}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": f"call_{uuid.uuid4().hex[:24]}",
        "name": name,
        "arguments": "",
    }
