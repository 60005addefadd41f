"""A small model guesses ahead of a large one (Leviathan 2023): chains of its likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.engine.sampler import Sampler
from paceline.engine.speculation.base import Draft, Forecast
from paceline.engine.speculation.shadows import Shadows
from paceline.engine.speculation.translation import Translation
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

_NUM_KINDS = 8  # a guess deeper in its chain counts as the eighth
_PRIOR = 0.7
_MIN_WINDOW = 32  # tokens; with fewer before it a model knows too little to guess
# A chain goes on while the model holds it for likelier than this to be right so far: a guess more
# costs about half a plain step. It knows well: of Qwen's guesses on code, those above 0.9 were all
# right, those below 0.6 every second.
MIN_CONFIDENCE = 0.6
_FEW_UNSEEN = 2  # after right guesses the last of them and the token after it are unread


class _Chain(Struct, eq=False):
    """A draft that is being made."""

    shadow: Sequence
    num_left: int
    guessed: list[int]
    confidence: float = 1.0  # the model's own, that all of them are right


class DraftModel:
    """Runs a small model over the sequences that draft, one step for all of them a guess.

    It reads at most the last `window` tokens of a text that is new to it, fewer where the time for
    more is not there. Tokens that it has not seen go into its first step.
    """

    num_kinds = _NUM_KINDS

    def __init__(
        self,
        shadows: Shadows,
        translation: Translation,
        sampler: Sampler,
        *,
        eos_ids: frozenset[int],
        max_tokens: int,
        window: int,
        max_len: int,
        min_confidence: float = MIN_CONFIDENCE,
    ) -> None:
        self._shadows = shadows
        self._translation = translation
        self._sampler = sampler
        self._likeliest = sampler.state(SamplingParams(temperature=0, logprobs=0), 0)
        self._eos_ids = eos_ids
        self._max_tokens = max_tokens
        self._window = min(window, max_len // 2)
        self._max_len = max_len  # of a shadow, guesses included
        self._min_confidence = min_confidence
        self._starts: dict[int, int] = {}  # where the shadow begins that was forecast

    def prior(self, kind: int) -> float:
        return _PRIOR

    def round_s(self, num_seqs: int) -> float:
        return self._shadows.seconds(num_seqs)

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        self._shadows.asked()
        num_tokens = min(limit, self._max_tokens)
        choice = self._choose_start(seq, num_tokens, budget_s)
        if choice is None:
            return Forecast(kinds=())
        self._starts[seq.number], setup_s = choice
        return Forecast(kinds=[min(i, _NUM_KINDS - 1) for i in range(num_tokens)], setup_s=setup_s)

    def _choose_start(
        self, seq: Sequence, num_ahead: int, budget_s: float
    ) -> tuple[int, float] | None:
        """Return where the shadow begins, and the cost of reading from there what it lacks.

        An existing shadow goes on where that can be paid, else one is begun that can.
        """
        num_tokens = len(seq.token_ids)
        shadow = self._shadows.get(seq.number)
        if shadow is not None:
            num_unseen = shadow.num_unseen(num_tokens)
            is_long = num_tokens - shadow.start + num_ahead > self._max_len
            if not is_long and self._read_s(num_unseen) <= budget_s:
                return shadow.start, self._read_s(num_unseen)
        window = self._window
        while window >= _MIN_WINDOW or window == self._window:
            start = _window_start(num_tokens, window)
            num_unseen = num_tokens - start
            if self._read_s(num_unseen) > budget_s:
                ids = self._translation.to_draft(seq.token_ids, start)
                num_unseen = len(ids) - self._shadows.num_cached(seq, ids)
            if self._read_s(num_unseen) <= budget_s:
                return start, self._read_s(num_unseen)
            window //= 2
        return None

    def _read_s(self, num_unseen: int) -> float:
        """Return what reading so many tokens costs on top of a draft's first step."""
        if num_unseen <= _FEW_UNSEEN:
            return 0.0
        return self._shadows.seconds(num_unseen) - self._shadows.seconds(1)

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        numbers = {seq.number for seq, _, _ in wanted}
        chains = []
        for seq, _, length in wanted:
            start = self._starts[seq.number]
            ids = self._translation.to_draft(seq.token_ids, start)
            shadow = None
            if ids and len(ids) + length <= self._max_len:
                shadow = self._shadows.follow(seq, start, ids, length, numbers)
            chains.append(None if shadow is None else _Chain(shadow.seq, length, []))
        self._run([chain for chain in chains if chain is not None])
        drafts = []
        for (seq, _, length), chain in zip(wanted, chains, strict=True):
            guessed = [] if chain is None else chain.guessed
            drafts.append(Draft(self._translation.to_target(seq.token_ids, guessed)[:length]))
        return drafts

    def _run(self, chains: list[_Chain]) -> None:
        """Guess until every chain is done; all that still run share the steps."""
        going = {chain.shadow.number: chain for chain in chains}
        while going:
            done, logits = self._shadows.forward(self._next_chunks(going.values()))
            ids, details = self._sampler.sample(
                logits, list(range(len(done))), [self._likeliest] * len(done)
            )
            for seq, token_id, detail in zip(done, ids, details, strict=True):
                chain = going[seq.number]
                if detail is None:  # a broken model says nothing
                    del going[seq.number]
                    continue
                chain.guessed.append(token_id)
                seq.token_ids.append(token_id)
                chain.num_left -= 1
                chain.confidence *= math.exp(detail[0])
                is_sure = chain.confidence >= self._min_confidence
                if not chain.num_left or not is_sure or token_id in self._eos_ids:
                    del going[seq.number]

    def _next_chunks(self, chains: Iterable[_Chain]) -> list[tuple[Sequence, int]]:
        """Return what a step computes: single tokens first, then as much else as fits."""
        num_left = self._shadows.max_tokens
        pending = [
            (len(chain.shadow.token_ids) - chain.shadow.num_computed, chain.shadow)
            for chain in chains
        ]
        chunks = []
        for num_unseen, seq in sorted(pending, key=lambda pair: pair[0]):
            n = min(num_unseen, num_left)
            if n:
                chunks.append((seq, n))
                num_left -= n
        return sorted(chunks, key=lambda chunk: chunk[1])

    def release(self, seq: Sequence) -> None:
        self._shadows.drop(seq.number)
        self._starts.pop(seq.number, None)

    def close(self) -> None:
        self._shadows.close()


def _window_start(num_tokens: int, window: int) -> int:
    """Return where the last half to whole `window` of a text begins.

    Starts are half windows apart, so that texts which share a beginning mostly share this one, too.
    """
    if num_tokens <= window:
        return 0
    stride = max(window // 2, 1)
    return (num_tokens - stride) // stride * stride
