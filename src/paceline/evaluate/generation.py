"""Greedy answers and log-likelihoods, through the engine that serves: batched, and resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from paceline.bench.statistics import share_figure
from paceline.completion import Choice, ChoiceBuilder
from paceline.engine.build import LoadedModel
from paceline.errors import ParameterError
from paceline.evaluate.loops import loop_period
from paceline.evaluate.state import State
from paceline.llm import new_request, stream
from paceline.types import SamplingParams

Show = Callable[[str, int, int], None]  # what, done, total
_BATCH = 256  # requests that the engine knows of at once


class Prompt(Struct, frozen=True, kw_only=True):
    """What a greedy answer follows, and where it ends at the latest."""

    token_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...] = ()


class Answer(Struct, frozen=True, kw_only=True):
    """A greedy answer; `loop` is the period of the cycle that it ends in."""

    text: str
    num_tokens: int
    is_cut: bool  # by its max_tokens
    loop: int | None


class Subject(Struct, frozen=True, kw_only=True):
    """A model under evaluation; `role` keeps its results apart from the reference's."""

    role: str
    loaded: LoadedModel
    state: State
    show: Show
    is_chat: bool  # questions go through the chat template

    def key(self, name: str) -> str:
        return f"{self.role} {name}"


def question_ids(subject: Subject, question: str, *, raw: str) -> list[int]:
    """Return the ids of a user's `question`, or of the plain text `raw` where no chat is wanted."""
    if subject.is_chat:
        return subject.loaded.encode_chat([{"role": "user", "content": question}])
    return subject.loaded.encode_prompt(raw)


def answers(subject: Subject, prompts: Mapping[str, Prompt], *, what: str) -> dict[str, Answer]:
    """Return the greedy answer to each prompt. Law 1 makes it the same in any batch."""
    requests = {
        name: (
            prompt.token_ids,
            SamplingParams(temperature=0, max_tokens=prompt.max_tokens, stop=prompt.stop),
        )
        for name, prompt in prompts.items()
    }
    found = _run(subject, requests, what=what, keep=_answer)
    return {name: Answer(**value) for name, value in found.items()}


def log_likelihoods(
    subject: Subject, texts: Mapping[str, tuple[list[int], int]], *, what: str
) -> dict[str, float]:
    """Return the log-probability of the tokens of each text from index `first` on, summed."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    requests = {name: (ids, params) for name, (ids, _) in texts.items()}

    def keep(name: str, choice: Choice) -> float:
        first = texts[name][1]
        return sum(token.logprob for token in choice.prompt_logprobs[first:])

    return _run(subject, requests, what=what, keep=keep)


def loops_of(found: Iterable[Answer]) -> dict[str, Any]:
    """Return how many answers end in a loop, their share, and how many were cut by their limit."""
    listed = list(found)
    count = sum(answer.loop is not None for answer in listed)
    return {
        "num_answers": len(listed),
        "num_cut": sum(answer.is_cut for answer in listed),
        "num_loops": count,
        "share": share_figure(count, len(listed)).as_dict(),
    }


def _answer(name: str, choice: Choice) -> dict[str, Any]:
    is_cut = choice.finish_reason == "length"
    # An answer that the model ended has left whatever it went round in.
    period = loop_period(choice.token_ids) if is_cut else None
    return {
        "text": choice.text, "num_tokens": len(choice.token_ids), "is_cut": is_cut, "loop": period
    }  # fmt: skip


def _run(
    subject: Subject,
    wanted: Mapping[str, tuple[Sequence[int], SamplingParams]],
    *,
    what: str,
    keep: Callable[[str, Choice], Any],
) -> dict[str, Any]:
    """Return what `keep` makes of each request's choice; each is in the state once it is done."""
    state, total = subject.state, len(wanted)
    missing = [name for name in wanted if subject.key(name) not in state]
    subject.show(what, total - len(missing), total)
    for start in range(0, len(missing), _BATCH):
        named, builders = {}, {}
        for name in missing[start : start + _BATCH]:
            request = new_request(*wanted[name])
            try:
                subject.loaded.engine.check(request)
            except ParameterError as error:
                raise type(error)(f"{name}: {error}", param=error.param) from None
            named[request.id] = (name, request)
            builders[request.id] = ChoiceBuilder(0)
        for delta in stream(subject.loaded.engine, [request for _, request in named.values()]):
            builder = builders[delta.request_id]
            builder.add(delta)
            if builder.is_finished:
                name = named[delta.request_id][0]
                state.put(subject.key(name), keep(name, builders.pop(delta.request_id).choice()))
                done = total - len(missing) + start + len(named) - len(builders)
                subject.show(what, done, total)
    return {name: state[subject.key(name)] for name in wanted}
