"""ChoiceMaker: the sequences of a request, as the engine takes it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from paceline.engine.sampler import Sampler, choice_seed, mix, unscored
from paceline.engine.sequence import Sequence, StreamDecoder
from paceline.text.stream_decoder import StopMatcher
from paceline.types import Request, SamplingParams


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...

    def stream_decoder(self, skip_special: bool) -> StreamDecoder: ...


class ChoiceMaker(Struct, frozen=True, kw_only=True):
    """What the choices of every request of an engine depend on, besides the request."""

    tokenizer: Tokenizer
    sampler: Sampler
    eos_ids: frozenset[int]
    seed: int  # base of the seeds of requests that bring none
    max_len: int  # tokens that a sequence may have, prompt and answer together

    def choices(
        self, request: Request, *, request_number: int, first_number: int, arrival_ns: int
    ) -> list[Sequence]:
        """Return the choices of a request; the first computes the prompt for its siblings.

        A request without a seed gets one from the engine's seed and the count of requests so far.
        """
        params, num_prompt = request.params, len(request.prompt_token_ids)
        seed = mix(self.seed, request_number) if params.seed is None else params.seed
        max_len = self.max_len
        if params.max_tokens is not None:
            max_len = min(max_len, num_prompt + params.max_tokens)
        ends, bad_words = self._ends(params), self.sampler.bad_words(params)
        choices = [
            Sequence(
                request=request,
                index=index,
                number=first_number + index,
                token_ids=list(request.prompt_token_ids),
                max_len=max_len,
                sampler=self.sampler.state(
                    params,
                    choice_seed(seed, index),
                    request.prompt_token_ids,
                    ends=ends,
                    bad_words=bad_words,
                ),
                decoder=self.tokenizer.stream_decoder(params.skip_special_tokens),
                matcher=StopMatcher(params.stop, params.include_stop_str_in_output)
                if params.stop
                else None,
                ends=ends,
                arrival_ns=arrival_ns,
                grammar=request.grammar.start(may_end_early=not params.ignore_eos)
                if request.grammar is not None
                else None,
            )
            for index in range(params.n)
        ]
        choices[0].siblings = choices[1:]
        if params.prompt_logprobs is not None:
            scores = [unscored(request.prompt_token_ids[0])]
            for choice in choices:  # one list: the first choice computes the prompt for all
                choice.scores = scores
        return choices

    def _ends(self, params: SamplingParams) -> dict[int, str | int | None]:
        """Return the tokens that end a choice, each with its stop_reason."""
        ends: dict[int, str | int | None] = {}
        if not params.ignore_eos:
            ends |= dict.fromkeys(self.eos_ids)
        if params.skip_special_tokens:  # a hidden marker's text never reaches the stop matcher
            special = self.tokenizer.special_tokens
            ends |= {special[text]: text for text in params.stop if text in special}
        return ends | {token_id: token_id for token_id in params.stop_token_ids}
