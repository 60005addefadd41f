"""Seeds, sampler states and the batched native sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import paceline._native as native
from paceline.backends.base import F32
from paceline.types import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from paceline.engine.masks import U32

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MAX_INT = 2**31 - 1
NONE_ALLOWED = -2  # instead of a token: what its row may choose is nothing
_HUGE = 1e30  # a logit times or divided by it is still a finite float


class SamplerState(Protocol):
    """What a sequence's next draw depends on besides its logits."""

    def commit(self, token_id: int, /) -> None: ...


class Encoder(Protocol):
    """The part of a tokenizer that the sampler needs."""

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...


def mix(seed: int, number: int) -> int:
    """Return a seed in [-2**63, 2**63) that is unrelated to those of other numbers (SplitMix64)."""
    z = (seed + number * _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request: choice 0 draws as a request with n=1 does.

    A request with `n=1, seed=choice_seed(s, i)` gives the same text as choice i of `seed=s`.
    """
    return seed if index == 0 else mix(seed, index)


class Sampler:
    """Chooses the next token of each sequence; a row's choice never depends on the other rows.

    Ids from `vocab_size` on are padding of the model's head and are never chosen.
    """

    def __init__(self, vocab_size: int, end_ids: Seq[int], encoder: Encoder) -> None:
        self._native = native.Sampler(vocab_size)
        self._end_ids = tuple(end_ids)
        self._encoder = encoder

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the bad words as tokens, each with and without a space before it.

        The last token of one may not follow its others.
        """
        words = [
            self._encoder.encode(text, add_special=False)
            for word in params.bad_words
            for text in (word, " " + word)
        ]
        return [word for word in words if word]

    def state(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Seq[int] = (),
        *,
        ends: Iterable[int] = (),
        bad_words: list[list[int]] | None = None,
    ) -> SamplerState:
        """Return the state of a sequence that has no output yet.

        `ends` are the tokens that end it, held back until min_tokens like the model's own.
        `bad_words` are those of `params` as tokens: choices of a request share them.
        """
        state: SamplerState = native.SamplerState(
            seed=seed & _MASK,
            temperature=min(params.temperature, _HUGE),
            top_k=min(max(params.top_k, 0), _MAX_INT),
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repetition=min(max(params.repetition_penalty, 1 / _HUGE), _HUGE),
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            bias=list(params.logit_bias.items()),
            bad_words=bad_words or [],
            end_ids=[*self._end_ids, *ends],
            min_tokens=min(params.min_tokens, _MAX_INT),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt=list(prompt) if params.repetition_penalty != 1 else [],
        )
        return state

    def score(
        self, logits: F32, rows: list[int], token_ids: list[int], num_top: int
    ) -> list[TokenLogprob]:
        """Return the raw log-probability of each given token in its row of logits.

        A bias makes it the row's choice, so the numbers are those of a token that is generated. A
        row that is not finite scores nothing: neither will the row that the sequence samples from.
        """
        states = [self._forced(token_id, num_top) for token_id in token_ids]
        _, details = self.sample(logits, rows, states)
        return [
            unscored(token_id) if detail is None else token_logprob(token_id, detail)
            for token_id, detail in zip(token_ids, details, strict=True)
        ]

    def _forced(self, token_id: int, num_top: int) -> SamplerState:
        state: SamplerState = native.SamplerState(
            seed=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, repetition=1.0,
            presence=0.0, frequency=0.0, bias=[(token_id, _HUGE)], bad_words=[], end_ids=[],
            min_tokens=0, num_logprobs=num_top, prompt=[],
        )  # fmt: skip
        return state

    def sample(
        self,
        logits: F32,
        rows: list[int],
        states: list[SamplerState],
        masks: U32 | None = None,
        mask_rows: Seq[int] = (),
    ) -> tuple[list[int], list[tuple[float, int, list[tuple[int, float]]] | None]]:
        """Return token ids and raw log-probabilities, where asked for, of `rows` of logits [L, V].

        `mask_rows` has for each of `rows` the row of `masks` [.., W] (see `Masks`) that says what
        it may choose, -1 for anything; it is empty where no row is bound.

        An id below 0 means that nothing could be chosen: see `describe_failure`.
        """
        if not rows:
            return [], []
        ids, details = self._native.sample(logits, rows, states, masks, mask_rows)
        return ids, details


def describe_failure(token_id: int) -> str:
    """Return why no token was chosen, for an id below 0 from `Sampler.sample`."""
    if token_id == -1:
        return (
            "the model's logits are not finite (NaN or infinity): weights or activations overflow"
        )
    return "every token is forbidden by bad_words, min_tokens and structured: loosen them"


def forbidding_param(params: SamplingParams) -> str | None:
    """Return which of `params` can forbid a token beside a structure: a bias never does."""
    return next((name for name in ("bad_words", "min_tokens") if getattr(params, name)), None)


def unscored(token_id: int) -> TokenLogprob:
    """Return what is said of a prompt's first token, which follows nothing."""
    return TokenLogprob(token_id=token_id, logprob=math.nan, rank=0)


def token_logprob(
    token_id: int, detail: tuple[float, int, list[tuple[int, float]]]
) -> TokenLogprob:
    logprob, rank, top = detail
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
