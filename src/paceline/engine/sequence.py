"""Sequence: one choice of one request, from submission to its last token."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from paceline.engine.sampler import SamplerState
from paceline.types import FinishReason, Request, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from paceline.engine.chains import Chain
    from paceline.engine.masks import GrammarState
    from paceline.engine.speculation.base import Draft
    from paceline.measure.ledger import Ledger


class StreamDecoder(Protocol):
    """Token ids in, whole characters out (`paceline.text.stream_decoder`)."""

    def feed(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class StopMatcher(Protocol):
    """Text in, text that is safe to show out, and the stop string that completed."""

    def feed(self, text: str, /) -> tuple[str, str | None]: ...

    def flush(self) -> str: ...


class State(enum.Enum):
    """`WAITING` holds no blocks, `RUNNING` holds the blocks of all its known tokens."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence(Struct, eq=False, kw_only=True):
    """Known tokens, how many of them are in the KV cache, and all that the next token depends on.

    Sampler, grammar, decoder and stop matcher outlive a preemption, so a resumed sequence goes on
    exactly where it was. `siblings` are the request's other choices while they wait for the prompt
    that this one computes for all.
    """

    request: Request
    index: int
    number: int  # order of submission over all sequences of the engine
    token_ids: list[int]
    max_len: int  # the sequence ends when it has so many tokens
    sampler: SamplerState
    decoder: StreamDecoder
    matcher: StopMatcher | None
    ends: Mapping[int, str | int | None]  # tokens that end it -> the stop_reason each gives
    arrival_ns: int
    ledger: Ledger | None = None
    grammar: GrammarState | None = None
    siblings: list[Sequence] = field(default_factory=list)

    state: State = State.WAITING
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    table_epoch: int = 0  # changes when an entry of block_table changes; appending leaves it
    chain: Chain | None = None  # the prefix cache's notes
    num_cached: int | None = None  # prompt tokens found in the cache at the first admission
    num_preemptions: int = 0
    has_lost_seat: bool = False  # to another; else its last preemption was for KV memory
    draft: Draft | None = None  # guesses that this step checks
    num_drafted: int = 0  # guesses checked so far
    num_accepted: int = 0  # and those that were right
    num_forced: int = 0  # tokens that its structure forced, without a step of their own
    scores: list[TokenLogprob] | None = None  # of the prompt so far; None: not asked for
    has_told_scores: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scheduled_ns: int = 0
    first_token_ns: int = 0
    first_text_ns: int = 0  # the first token may show no text
    last_token_ns: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    def unscored(self, num_tokens: int) -> range:
        """Return the positions in the next chunk whose logits score a token of the prompt."""
        if self.scores is None:
            return range(0)
        begin = max(self.num_computed, len(self.scores) - 1)
        return range(begin, min(self.num_computed + num_tokens, self.num_prompt - 1))

    @property
    def is_scored(self) -> bool:
        """Whether nothing is left of the prompt to score, or nothing was asked for."""
        return self.scores is None or len(self.scores) >= self.num_prompt

    def take_scores(self) -> tuple[TokenLogprob, ...]:
        """Return the prompt's scores the first time, then none."""
        if self.scores is None or self.has_told_scores:
            return ()
        self.has_told_scores = True
        return tuple(self.scores)

    def append_token(self, token_id: int, now_ns: int) -> str:
        """Take a chosen token; return the text that it makes safe to show.

        Sets `finish_reason` when the token ends the sequence. The text of an end token is not
        shown. Stop strings are looked for from `min_tokens` on.
        """
        is_over = self.grammar is not None and self.grammar.commit(token_id)
        self.token_ids.append(token_id)
        self.sampler.commit(token_id)
        if not self.first_token_ns:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
        if token_id in self.ends:
            self.finish_reason, self.stop_reason = "stop", self.ends[token_id]
            return self._flush()
        text = self._visible(self.decoder.feed(token_id))
        if self.finish_reason is None and is_over:
            text += self._flush()
            self.finish_reason = "stop"
        if self.finish_reason is None and len(self.token_ids) >= self.max_len:
            text += self._flush()
            self.finish_reason = self.finish_reason or "length"
        return text

    def _visible(self, text: str) -> str:
        if self.matcher is None or self.num_output < self.request.params.min_tokens:
            return text
        text, matched = self.matcher.feed(text)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        return text

    def _flush(self) -> str:
        """Return the text still held back by the decoder and the stop matcher."""
        text = self.decoder.flush()
        if self.matcher is None:
            return text
        text, matched = self.matcher.feed(text)
        if matched is None:
            return text + self.matcher.flush()
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = "stop", matched
        return text

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            cached_tokens=self.num_cached or 0,
        )

    def timings(self, now_ns: int) -> Timings:
        """Return the times of a choice that ends now; what never happened counts as now."""
        num_gaps = self.num_output - 1
        tpot_s = (
            (self.last_token_ns - self.first_token_ns) / num_gaps / 1e9 if num_gaps > 0 else None
        )
        return Timings(
            queue_s=((self.scheduled_ns or now_ns) - self.arrival_ns) / 1e9,
            ttft_s=((self.first_token_ns or now_ns) - self.arrival_ns) / 1e9,
            tpot_s=tpot_s,
            e2e_s=(now_ns - self.arrival_ns) / 1e9,
            num_preemptions=self.num_preemptions,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_forced=self.num_forced,
        )
