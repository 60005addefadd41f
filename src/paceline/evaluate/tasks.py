"""Tasks from local files: multiple choice by log-likelihood, and questions that want a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from msgspec import Struct

from paceline.bench.statistics import share_figure
from paceline.bench.workload_files import read_lines
from paceline.errors import ParameterError
from paceline.evaluate.generation import (
    Prompt,
    Subject,
    answers,
    log_likelihoods,
    loops_of,
    question_ids,
)

_NUMBER = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?")
_STOP = ("\nQuestion:",)


class MultipleChoice(Struct, frozen=True, kw_only=True):
    """A question, the texts to choose from, and the index of the right one."""

    question: str
    choices: list[str]
    right: int


class NumberQuestion(Struct, frozen=True, kw_only=True):
    """A question whose answer is the last number of a text."""

    question: str
    number: Decimal


class TaskFile(Struct, frozen=True, kw_only=True):
    """The items of one file; a line with `choices` is multiple choice, else it wants a number."""

    name: str
    choices: list[MultipleChoice]
    numbers: list[NumberQuestion]


def read_tasks(path: str, limit: int | None) -> TaskFile:
    """Return the first `limit` items of a JSONL file. Raises ParameterError with the line."""
    choices, numbers = [], []
    lines = read_lines(path)[:limit]
    for number, line in enumerate(lines, 1):
        try:
            if "choices" in line:
                choices.append(_multiple_choice(line))
            else:
                numbers.append(_number_question(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ParameterError(
                f"{path}, line {number}: {_reason(error)}; a line is "
                '{"question": "…", "choices": ["…", …], "answer": 0} or '
                '{"question": "…", "answer": "… 42"}'
            ) from None
    if not lines:
        raise ParameterError(f"{path} holds no task: write one a line")
    return TaskFile(name=path, choices=choices, numbers=numbers)


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _multiple_choice(line: dict[str, Any]) -> MultipleChoice:
    """Read one line; the answer is an index from 0, a letter from A, or the text of a choice."""
    choices = line["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise ValueError("choices must be a list of two texts or more")
    answer = line["answer"]
    letters = [chr(ord("A") + i) for i in range(len(choices))]
    if answer in choices:
        right = choices.index(answer)
    elif answer in letters:
        right = letters.index(answer)
    elif isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        right = answer
    else:
        raise ValueError(f"answer is {answer!r}: no index from 0, letter from A, or choice")
    return MultipleChoice(question=_text(line, "question"), choices=choices, right=right)


def _number_question(line: dict[str, Any]) -> NumberQuestion:
    answer = line["answer"]
    number = last_number(answer if isinstance(answer, str) else str(answer))
    if number is None or isinstance(answer, bool):
        raise ValueError(f"answer is {answer!r}: it has no number")
    return NumberQuestion(question=_text(line, "question"), number=number)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _text(line: dict[str, Any], name: str) -> str:
    if not _is_text(line[name]):
        raise ValueError(f"{name} is {line[name]!r}: it must be a text")
    return str(line[name])


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text: 1234.5 in "about 1,234.5 km". None where there is none."""
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:  # more digits than a Decimal takes
        return None


def run_choices(subject: Subject, name: str, items: Sequence[MultipleChoice]) -> dict[str, Any]:
    """Return the shares of items whose right choice is the likeliest after the question.

    `accuracy` compares the sums of the choices' log-probabilities, `accuracy_normalised` the sums
    a byte of text, so that a long choice is no worse for its length.
    """
    texts = {}
    for number, item in enumerate(items):
        head = f"Question: {item.question}\nAnswer:"
        first = len(subject.loaded.encode_prompt(head))
        for idx, choice in enumerate(item.choices):
            ids = subject.loaded.encode_prompt(f"{head} {choice}")
            # A tokenizer may join the choice to the last token before it: then that one counts.
            texts[f"{name} choice {number}.{idx}"] = (ids, min(first, len(ids) - 1))
    sums = log_likelihoods(subject, texts, what=name)
    num_right = num_right_normalised = 0
    for number, item in enumerate(items):
        keys = [f"{name} choice {number}.{idx}" for idx in range(len(item.choices))]
        scores = np.array([sums[key] for key in keys])
        num_bytes = np.array([len(choice.encode()) for choice in item.choices])
        num_right += int(scores.argmax()) == item.right
        num_right_normalised += int((scores / num_bytes).argmax()) == item.right
    return {
        "num_items": len(items),
        "accuracy": share_figure(num_right, len(items)).as_dict(),
        "accuracy_normalised": share_figure(num_right_normalised, len(items)).as_dict(),
    }


def run_numbers(
    subject: Subject, name: str, items: Sequence[NumberQuestion], max_tokens: int
) -> dict[str, Any]:
    """Return the share of greedy answers whose last number is the right one."""
    prompts = {
        f"{name} number {number}": Prompt(
            token_ids=question_ids(
                subject, item.question, raw=f"Question: {item.question}\nAnswer:"
            ),
            max_tokens=max_tokens,
            stop=() if subject.is_chat else _STOP,
        )
        for number, item in enumerate(items)
    }
    found = answers(subject, prompts, what=name)
    pairs = zip(found.values(), items, strict=True)
    num_right = sum(last_number(answer.text) == item.number for answer, item in pairs)
    return {
        "num_items": len(items),
        "accuracy": share_figure(num_right, len(items)).as_dict(),
        "loops": loops_of(found.values()),
    }
