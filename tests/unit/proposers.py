"""Proposers that know or guess on purpose, and a pace that always drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.sequence import Sequence
from paceline.engine.speculation.base import ROOT, Draft, Forecast, Offer, RoundCost

Shape = Callable[[random.Random, list[int], int], Draft]  # (likely tokens, most nodes) -> a draft


class Eager:
    """Drafts as long as a draft may be, whatever came of it before; at most `most` tokens."""

    def __init__(self, most: int = 5) -> None:
        self.most = most
        self.seen: list[dict[str, float]] = []

    @property
    def budget_s(self) -> float:
        return math.inf

    def is_open(self, num_rows: int, num_prefill: int) -> bool:
        return True

    def better(self, offers: Seq[Offer], num_rows: int, round_s: RoundCost) -> int:
        return len(self.seen) % len(offers)

    def lengths(
        self, offers: Seq[Offer], num_rows: int, num_prefill: int, round_s: RoundCost
    ) -> list[int]:
        return [min(len(offer.chances), self.most) for offer in offers]

    def observe(self, **seen: float) -> None:
        self.seen.append(seen)


def eager_pace(most: int = 5) -> Callable[[object], Eager]:
    """Return what makes an Eager where the engine makes a Goodput of known costs."""
    return lambda known: Eager(most)


class Oracle:
    """Guesses from `texts`, the tokens that sequences will have, by the number of the sequence.

    A shape makes the draft of the tokens to come; without one it is a chain of them.
    """

    num_kinds = 4

    def __init__(
        self, texts: Callable[[Sequence], Seq[int]], shape: Shape | None = None, seed: int = 0
    ) -> None:
        self._texts = texts
        self._shape = shape
        self._rng = random.Random(seed)
        self.released: list[int] = []

    def prior(self, kind: int) -> float:
        return 0.5

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        return Forecast(kinds=[min(i, self.num_kinds - 1) for i in range(limit)])

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        drafts = []
        for seq, _, length in wanted:
            ahead = list(self._texts(seq)[len(seq.token_ids) :][:length])
            if self._shape is None:
                drafts.append(Draft(ahead))
            else:
                drafts.append(self._shape(self._rng, ahead, length))
        return drafts

    def round_s(self, num_seqs: int) -> float:
        return 0.0

    def release(self, seq: Sequence) -> None:
        self.released.append(seq.number)

    def close(self) -> None:
        pass


def wild_tree(vocab_size: int) -> Shape:
    """Return a shape: a random tree, of likely tokens and nonsense, of any size down to none."""

    def shape(rng: random.Random, ahead: list[int], length: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(rng.randint(0, length)):
            parent = rng.choice([ROOT, node - 1, node - 1, rng.randint(ROOT, node - 1)])
            depth = 0 if parent == ROOT else depths[parent] + 1
            is_likely = depth < len(ahead) and rng.random() < 0.6
            tokens.append(ahead[depth] if is_likely else rng.randrange(vocab_size))
            parents.append(parent)
            depths.append(depth)
        return Draft(tokens, parents)

    return shape


def wild_chain(vocab_size: int) -> Shape:
    """Return a shape: a chain that is right for a while and then wrong, or wrong at once."""

    def shape(rng: random.Random, ahead: list[int], length: int) -> Draft:
        tokens = [*ahead, *(rng.randrange(vocab_size) for _ in range(length))][:length]
        wrong = rng.randint(0, length)
        return Draft([*tokens[:wrong], *(rng.randrange(vocab_size) for _ in tokens[wrong:])])

    return shape
