"""Needles: a number hidden in long texts at several depths, asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from paceline.bench.statistics import share_figure
from paceline.errors import ParameterError
from paceline.evaluate.generation import Prompt, Subject, answers, question_ids

MAX_ANSWER = 32
_PEOPLE = ("The baker", "A neighbour", "The old captain", "Her cousin", "The gardener", "My aunt")
_VERBS = ("watched", "painted", "described", "carried", "remembered", "repaired")
_THINGS = ("the wooden boat", "a basket of pears", "the kitchen clock", "two grey horses",
           "the garden wall", "an unfinished letter", "the harbour lights")  # fmt: skip
_TIMES = ("before breakfast", "on a cold morning", "after the market closed", "in the long summer",
          "while it rained", "late in the evening")  # fmt: skip
_ASK = "What is the secret number of the lighthouse?"


def haystack(rng: random.Random, num_sentences: int) -> list[str]:
    """Return sentences that say nothing about the needle."""
    parts = (_PEOPLE, _VERBS, _THINGS, _TIMES)
    return [" ".join(rng.choice(words) for words in parts) + "." for _ in range(num_sentences)]


def hidden(sentences: Sequence[str], secret: int, depth: int) -> str:
    """Return the text with the needle after `depth` percent of its sentences."""
    at = round(len(sentences) * depth / 100)
    needle = f"The secret number of the lighthouse is {secret}."
    return " ".join([*sentences[:at], needle, *sentences[at:]])


def run_needles(
    subject: Subject, lengths: Sequence[int], depths: Sequence[int], *, seed: int
) -> dict[str, Any]:
    """Return for each length (prompt tokens, at most) and depth whether the number was found."""
    _check_room(subject, max(lengths))
    prompts, secrets = {}, {}
    for length in lengths:
        for depth in depths:
            name = f"needle {length} at {depth}%"
            rng = random.Random(f"{seed}:{length}:{depth}")
            secrets[name] = rng.randrange(10_000, 100_000)
            ids = _prompt(subject, rng, secrets[name], length, depth)
            prompts[name] = Prompt(token_ids=ids, max_tokens=MAX_ANSWER)
    found = answers(subject, prompts, what="needles")
    is_found = {name: str(secrets[name]) in answer.text for name, answer in found.items()}
    cells = [
        {
            "length": length, "depth": depth,
            "num_tokens": len(prompts[name].token_ids), "found": is_found[name],
        }
        for length in lengths
        for depth in depths
        for name in [f"needle {length} at {depth}%"]
    ]  # fmt: skip
    return {
        "share": share_figure(sum(is_found.values()), len(cells)).as_dict(),
        "cells": cells,
    }


def _check_room(subject: Subject, length: int) -> None:
    """Raise ParameterError unless a prompt and its answer fit: a cut one finds nothing."""
    context = subject.loaded.engine.max_model_len
    if length + MAX_ANSWER > context:
        raise ParameterError(
            f"--needle is {length}: beside an answer of {MAX_ANSWER} tokens the context of "
            f"{context} holds {max(context - MAX_ANSWER, 0)}: ask for a shorter text, or raise "
            "--max-model-len or --kv-memory"
        )


def _prompt(
    subject: Subject, rng: random.Random, secret: int, length: int, depth: int
) -> list[int]:
    """Return the longest prompt of whole sentences within `length` tokens, found by bisection."""
    sentences = haystack(rng, length // 4 + 1)  # none is shorter than five tokens

    def ids(count: int) -> list[int]:
        text = hidden(sentences[:count], secret, depth)
        raw = f"{text}\nQuestion: {_ASK}\nAnswer: The secret number of the lighthouse is"
        return question_ids(subject, f"{text}\n\n{_ASK}", raw=raw)

    low, high = 0, len(sentences)
    if len(ids(0)) > length:
        raise ParameterError(
            f"--needle is {length}: the needle and its question alone have {len(ids(0))} tokens; "
            "ask for a longer text"
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(ids(middle)) <= length else (low, middle - 1)
    return ids(low)
