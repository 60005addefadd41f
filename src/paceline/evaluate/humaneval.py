"""HumanEval (Chen 2021): functions that a model completes, and the share that pass their tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from paceline.bench.statistics import share_figure
from paceline.bench.workload_files import humaneval_path, read_lines
from paceline.errors import ParameterError
from paceline.evaluate.generation import Prompt, Subject, answers, loops_of, question_ids
from paceline.evaluate.sandbox import isolation, run_program

_ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n"
_STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")
_BLOCK = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Problem(Struct, frozen=True, kw_only=True):
    """One function: its head with a docstring, its name, and a `check(candidate)`."""

    prompt: str
    entry_point: str
    test: str


def read_problems(path: str | None, limit: int | None) -> list[Problem]:
    """Return the first `limit` problems, of a file or of the 164 that are fetched once."""
    shown = path or str(humaneval_path())
    problems = []
    for number, line in enumerate(read_lines(shown)[:limit], 1):
        fields = {name: line.get(name) for name in Problem.__struct_fields__}
        if not all(isinstance(value, str) and value for value in fields.values()):
            raise ParameterError(
                f"{shown}, line {number} is no problem: it must have the texts {', '.join(fields)}"
            )
        problems.append(Problem(**fields))  # type: ignore[arg-type]
    if not problems:
        raise ParameterError(f"{shown} holds no problem: write one a line")
    return problems


def program(problem: Problem, answer: str, *, is_chat: bool) -> str:
    """Return the program that tests `answer`.

    A chat's answer is its first code block, or all of it without one. Where that defines the
    function it takes the prompt's place, behind the imports above the prompt's own definition;
    else it goes on with the prompt.
    """
    code = answer
    if is_chat and (block := _BLOCK.search(answer)):
        code = block[1]
    definition = f"def {problem.entry_point}("
    if is_chat and definition in code:
        code = problem.prompt.partition(definition)[0] + code
    else:
        code = problem.prompt + code
    return f"{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def run_humaneval(subject: Subject, problems: Sequence[Problem], max_tokens: int) -> dict[str, Any]:
    """Return pass@1 of greedy answers. Runs what the model wrote: see `evaluate/sandbox.py`."""
    prompts = {
        f"humaneval {number}": Prompt(
            token_ids=question_ids(subject, _ASK + problem.prompt, raw=problem.prompt),
            max_tokens=max_tokens,
            stop=() if subject.is_chat else _STOP,
        )
        for number, problem in enumerate(problems)
    }
    found = answers(subject, prompts, what="humaneval")
    reasons: Counter[str] = Counter()
    for number, (name, answer) in enumerate(found.items()):
        subject.show("humaneval: running programs", number, len(found))
        key = subject.key(f"{name} verdict")
        if key not in subject.state:
            source = program(problems[number], answer.text, is_chat=subject.is_chat)
            subject.state.put(key, run_program(source).reason)
        reasons[subject.state[key]] += 1
    return {
        "num_items": len(problems),
        "pass_at_1": share_figure(reasons["passed"], len(problems)).as_dict(),
        "failures": {k: n for k, n in sorted(reasons.items()) if k != "passed"},
        "network_taken_away": bool(isolation()),
        "loops": loops_of(found.values()),
    }
