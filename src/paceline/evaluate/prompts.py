"""Prompts from a file, answered greedily to see how many answers end in a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.workload_files import read_lines
from paceline.errors import ParameterError
from paceline.evaluate.generation import Prompt, Subject, answers, loops_of, question_ids


def read_prompts(path: str, limit: int | None) -> list[str]:
    """Return the first `limit` prompts of a JSONL file of {"prompt": "…"}."""
    found = [line.get("prompt") for line in read_lines(path)[:limit]]
    for number, text in enumerate(found, 1):
        if not isinstance(text, str) or not text:
            raise ParameterError(
                f'{path}, line {number}: prompt is {text!r}: a line is {{"prompt": "a text"}}'
            )
    if not found:
        raise ParameterError(f'{path} holds no prompt: write one a line, {{"prompt": "a text"}}')
    return [str(text) for text in found]


def run_prompts(subject: Subject, texts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Return how many greedy answers to `texts` end in a loop."""
    prompts = {
        f"prompt {number}": Prompt(
            token_ids=question_ids(subject, text, raw=text), max_tokens=max_tokens
        )
        for number, text in enumerate(texts)
    }
    return {"loops": loops_of(answers(subject, prompts, what="prompts").values())}
