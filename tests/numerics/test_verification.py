"""Sampling along drafts, two million draws: the model's distribution, whatever is guessed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.engine.sampler import Sampler
from paceline.engine.speculation.base import Draft
from paceline.engine.speculation.verify import follow
from paceline.types import SamplingParams

VOCAB = 4  # token 0 never comes
NUM_TEXTS, BATCH = 70_000, 10_000
LENGTH = 10  # tokens of a text
NUM_GUESSED = 3  # a draft
# What follows a token depends on that token alone; the guesses follow shares of their own.
SUCCESSORS = np.asarray([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]])
GUESSES = np.asarray([0.1, 0.3, 0.6])
FIRST = 1  # the token before a text
# By degrees of freedom: 0.001 of all samples are beyond.
CHI_SQUARE = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 6: 22.5}


class NoWords:
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return []


def shares(temperature: float, top_p: float) -> np.ndarray:
    """Return the distribution that is sampled from, a row for each token before."""
    weights = SUCCESSORS ** (1 / temperature)
    if top_p < 1:
        weights[SUCCESSORS < 0.2] = 0  # 0.6 and 0.3 are enough
    return weights / weights.sum(axis=1, keepdims=True)


def write(params: SamplingParams, first_seed: int, rng: np.random.Generator) -> tuple:
    """Return texts [BATCH, LENGTH] that are written with drafts, and the right first guesses."""
    sampler = Sampler(VOCAB, (), NoWords())
    logits_after = np.full((VOCAB, VOCAB), -100.0, np.float32)
    logits_after[1:, 1:] = np.log(SUCCESSORS)
    texts = [
        SimpleNamespace(
            tokens=[FIRST], sampler=sampler.state(params, first_seed + i),
            draft=None, num_accepted=0,
        )
        for i in range(BATCH)
    ]  # fmt: skip
    first_right = None
    while going := [text for text in texts if len(text.tokens) <= LENGTH]:
        guessed = rng.choice([1, 2, 3], p=GUESSES, size=(len(going), NUM_GUESSED))
        for text, tokens in zip(going, guessed.tolist(), strict=True):
            text.draft = Draft(tokens)
        last = np.asarray([[text.tokens[-1]] for text in going])
        logits = logits_after[np.concatenate([last, guessed], axis=1)].reshape(-1, VOCAB)
        rows = list(range(0, len(logits), 1 + NUM_GUESSED))
        while going:
            ids, _ = sampler.sample(logits, rows, [text.sampler for text in going])
            following = follow(going, rows, ids)
            for text, token_id in zip(going, ids, strict=True):
                text.tokens.append(token_id)
                text.sampler.commit(token_id)
            going, rows = [text for text, _ in following], [row for _, row in following]
            if first_right is None:
                first_right = len(following)
    return np.asarray([text.tokens[1 : 1 + LENGTH] for text in texts]), first_right


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.85)])
def test_tokens_along_drafts_keep_the_models_distribution(temperature: float, top_p: float) -> None:
    """SPC-04: each place of the text after each token before it, and the share of right guesses."""
    params = SamplingParams(temperature=temperature, top_p=top_p)
    rng = np.random.default_rng(7)
    parts = [write(params, seed, rng) for seed in range(0, NUM_TEXTS, BATCH)]
    texts = np.concatenate([texts for texts, _ in parts])
    expected = shares(temperature, top_p)
    before = np.full(NUM_TEXTS, FIRST)
    for place in range(LENGTH):
        chi_square, num_free = 0.0, 0
        for token in np.unique(before):
            counts = np.bincount(texts[before == token, place], minlength=VOCAB)
            means = np.concatenate([[0.0], expected[token - 1]]) * counts.sum()
            assert counts[means == 0].sum() == 0
            seen = means > 0
            chi_square += float((((counts - means)[seen]) ** 2 / means[seen]).sum())
            num_free += int(seen.sum()) - 1
        assert chi_square < CHI_SQUARE[num_free], (place, chi_square)
        before = texts[:, place]
    num_right = sum(first_right for _, first_right in parts)
    assert num_right / NUM_TEXTS == pytest.approx(expected[FIRST - 1] @ GUESSES, abs=0.007)
