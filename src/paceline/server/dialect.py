"""Dialect: what one API has of its own, from reading a body to writing the answer to it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from paceline.completion import Choice
from paceline.errors import PacelineError
from paceline.server.delivery import Attended
from paceline.server.errors import ApiError, as_api_error
from paceline.server.schema import ChatRequest, CompletionRequest
from paceline.text.reasoning import Opening, Thought, ThoughtCount, ThoughtReader
from paceline.text.tool_calls import Content, Piece
from paceline.types import Delta, FinishReason, SamplingParams, Usage

if TYPE_CHECKING:
    from paceline.server.delivery import Generation
    from paceline.text.tokenizer import Tokenizer
    from paceline.text.tool_calls import ToolReader

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")

ApiRequest = ChatRequest | CompletionRequest


class Frame(Struct, frozen=True, kw_only=True):
    """What a writer is told of its call. `figures` are asked for when the usage is written.

    `prefixes`, one a choice, are written before the texts. `new_reader` makes what finds the calls
    in a choice's text; None: it holds none. `opening`: where answers of a model that reasons begin.
    """

    answer_id: str
    model: str
    tokenizer: Tokenizer
    params: SamplingParams
    num_prompt_tokens: int
    prefixes: Sequence[str] = ()
    new_reader: Callable[[], ToolReader] | None = None
    opening: Opening | None = None
    figures: Callable[[], dict[str, Any]] | None = None

    @property
    def is_read(self) -> bool:
        """Whether there may be more in an answer than words."""
        return self.new_reader is not None or self.opening is not None


class Writer(Protocol):
    """Writes the answer to one call: `whole`, or as a stream, which has the other methods.

    `quiet_s`: a stream without news for so long has what `idle` returns; None: it has nothing.
    """

    quiet_s: float | None

    def whole(self, choices: Sequence[Choice], n: int) -> bytes: ...

    def opening(self, num_choices: int) -> bytes: ...

    def chunks(self, index: int, delta: Delta) -> bytes: ...

    def idle(self) -> bytes: ...

    def closing(self, usages: Sequence[Usage], n: int) -> bytes: ...

    def failure(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""


class Followed(Attended, Protocol):
    """Events that are made whether or not somebody reads them."""

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def failure(self, error: ApiError) -> bytes:
        """Return the end for a reader that cannot read on."""


class Afterwards(Protocol):
    """Takes over answers that are made while nobody waits for them."""

    def begin(self, writer: Any, generation: Generation, work: Coroutine[Any, Any, Any]) -> bytes:
        """Return what the client is told at once. Precondition: `writer` is of its own dialect.

        `work` has the writer write the whole answer.
        """

    def stream(
        self, writer: Any, generation: Generation, events: AsyncGenerator[bytes, None]
    ) -> Followed:
        """Return what the client is told by and by, of events that are made without it, too."""


class Asked(Protocol):
    """A body that was read: what it asks for in OpenAI's terms, which all dialects come to."""

    @property
    def request(self) -> ApiRequest: ...

    @property
    def id_prefix(self) -> str:
        """What the answer's id begins with."""

    @property
    def pins(self) -> bool:
        """Whether the prompt's blocks are to stay in the prefix cache."""

    @property
    def wants_objects(self) -> bool:
        """Whether the arguments of calls must be JSON, because the answer has them as objects."""

    @property
    def background(self) -> Afterwards | None:
        """Where the answer is left, of a call that does not wait for it."""

    def writer(self, frame: Frame) -> Writer: ...

    def in_its_words(self, error: PacelineError) -> PacelineError:
        """Return an error about `request` as one about the body, by the names of its fields."""


@contextmanager
def own_words(asked: Asked) -> Iterator[None]:
    """While inside, errors name the fields that the client sent."""
    try:
        yield
    except PacelineError as error:
        raise asked.in_its_words(error) from None


class Names(Struct, frozen=True):
    """Where the parts of a request in OpenAI's terms stand in the body that it was made from.

    `messages` has a place for each message; `fields` are patterns, each with what replaces it in
    the name of a field and at the beginning of a message about one.
    """

    messages: Sequence[str]
    fields: Sequence[tuple[str, str]]

    def applied(self, error: PacelineError) -> ApiError:
        """Return the error in the names of the body."""
        known = as_api_error(error)
        return ApiError(
            known.status, self._text(str(known)),
            param=None if known.param is None else self._text(known.param),
            code=known.code, retry_after_s=known.retry_after_s,
        )  # fmt: skip

    def _text(self, text: str) -> str:
        text = _MESSAGE.sub(self._place, text)
        for pattern, name in self.fields:
            text = re.sub(pattern, name, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        idx = int(match[1])
        return self.messages[idx] if idx < len(self.messages) else match[0]


class PieceReader:
    """Reads one choice, whole or in deltas, as thoughts, words and calls."""

    def __init__(self, frame: Frame) -> None:
        self._tools = None if frame.new_reader is None else frame.new_reader()
        self._thoughts = self._count = None
        if frame.opening is not None:
            self._thoughts = ThoughtReader(frame.opening)
            self._count = ThoughtCount(frame.opening, frame.tokenizer)

    @property
    def has_only_whole_calls(self) -> bool:
        return self._tools is not None and self._tools.has_only_whole_calls

    @property
    def num_thought(self) -> int:
        """Tokens of the thinking so far."""
        return 0 if self._count is None else self._count.num_tokens

    def read(
        self, text: str, finish_reason: FinishReason | None, token_ids: Sequence[int]
    ) -> list[Piece]:
        """Return what is certain by now; with a finish reason, all the rest."""
        pieces: list[Piece] = []
        if self._thoughts is not None and self._count is not None:
            self._count.feed(token_ids)
            thought, text = self._thoughts.feed(text)
            if finish_reason is not None:
                more, said = self._thoughts.finish(is_cut=finish_reason == "length")
                thought, text = thought + more, text + said
            if thought:
                pieces.append(Thought(thought))
        if self._tools is None:
            return [*pieces, Content(text)] if text else pieces
        pieces += self._tools.feed(text) if text else []
        if finish_reason is not None:
            pieces += self._tools.finish(is_cut=finish_reason == "length")
        return pieces
