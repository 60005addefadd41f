"""Completion and Choice: whole answers, put together from the deltas of the engine."""

from __future__ import annotations

from msgspec import Struct, field

from paceline.types import Delta, FinishReason, Timings, TokenLogprob, Usage


class Choice(Struct, frozen=True, kw_only=True):
    """One continuation of a prompt. `logprobs` is None unless they were asked for.

    `prompt_logprobs` are those of the prompt's tokens, where they were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to one prompt: `outputs` has `params.n` choices, by index."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text


class ChoiceBuilder(Struct):
    """Collects the deltas of one choice. `choice()` is ready once `is_finished`."""

    index: int
    wants_logprobs: bool = False
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: tuple[TokenLogprob, ...] = ()
    _last: Delta | None = None

    @property
    def is_finished(self) -> bool:
        return self._last is not None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._last = delta

    def choice(self) -> Choice:
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        assert last.usage is not None
        assert last.timings is not None
        return Choice(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if self.wants_logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=last.usage,
            timings=last.timings,
            prompt_logprobs=self._prompt_logprobs,
        )
