"""Load: what was asked of a server, in a form that can be asked again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from paceline.explain.facts import CallFacts

Draw = Callable[[int, int], Sequence[int]]

_FOLLOWS_S = 0.02  # a client that asks again at once needs so long at most; a person does not


class Asked(Struct, frozen=True, kw_only=True):
    """One call: its lengths, and when it comes.

    `after` is the place in the load of the call whose end it waited for, as a client that asks one
    thing after the other does; None where it came by itself, `delay_s` after the load's begin.
    """

    num_prompt: int
    num_shared: int  # first tokens of the prompt, as an earlier one began
    donor: int | None = None  # the place of that one; None: it came before all of the load
    num_output: int  # of each choice
    num_steps: int  # that gave those tokens: fewer where guesses were right
    num_choices: int = 1
    after: int | None
    delay_s: float
    ready_s: float = 0.0  # from its coming until the engine has it
    tail_s: float = 0.0  # from its last token until its client has all of it
    has_content: bool = True  # else there is nothing that its TTFT could count to


def load_of(calls: Sequence[CallFacts], *, finds_all: bool = True) -> list[Asked]:
    """Return the load of recorded calls, in the order in which they came.

    Which beginnings the prompts had in common is not known, only how long they were: each is taken
    to be that of the call before it that is long enough, prompt and answer; where there is none,
    of one that all such calls, and the first of all, begin with. Without `finds_all` only what the
    prefix cache had of them counts: the rest it had given up.
    """
    calls = sorted(calls, key=lambda call: call.began_at)
    shared = _shared(calls, finds_all)
    leaders = _leaders(calls)
    load = []
    for i, call in enumerate(calls):
        leader = leaders[i]
        since = calls[0].began_at if leader is None else _end(calls[leader])
        num_output = max(round(call.answer_tokens), 1)
        num_unstepped = round(call.unstepped_tokens / call.num_choices)
        load.append(
            Asked(
                num_prompt=max(call.prompt_tokens, 1),
                num_shared=min(shared[i], call.prompt_tokens),
                donor=_donor(calls[:i], shared[i]),
                num_output=num_output,
                num_steps=max(num_output - num_unstepped, 1),
                num_choices=call.num_choices,
                after=leader,
                delay_s=call.began_at - since,
                ready_s=_seconds(call, "receive", "parse", "template", "tokenise"),
                tail_s=_seconds(call, "handoff", "send"),
                has_content=call.ttft_ms is not None,
            )
        )
    return load


def prompts_of(load: Sequence[Asked], draw: Draw) -> list[list[int]]:
    """Return the tokens of each prompt; `draw(i, n)` gives `n` that are call i's own, -1 nobody's.

    An answer is taken to have tokens of its call's own, too.
    """
    prompts: list[list[int]] = []
    for i, asked in enumerate(load):
        if asked.donor is None:
            known = draw(-1, asked.num_shared)
        else:
            answer = draw(asked.donor, load[asked.donor].num_output)
            known = [*prompts[asked.donor], *answer][: asked.num_shared]
        prompts.append([*known, *draw(i, asked.num_prompt - len(known))])
    return prompts


def _donor(calls: Sequence[CallFacts], num_shared: int) -> int | None:
    """Return the last of the calls that has as many tokens; None where nothing is shared."""
    if not num_shared:
        return None
    return next(
        (
            i for i in reversed(range(len(calls)))
            if calls[i].prompt_tokens + calls[i].answer_tokens >= num_shared
        ),
        None,
    )  # fmt: skip


def _shared(calls: Sequence[CallFacts], finds_all: bool) -> list[int]:
    """Return how many first tokens each prompt has in common with others.

    Repeats are counted in blocks of 32; the prefix cache finds shorter ones, such as the beginning
    that a chat template gives. Who came before the first prompt was computed found nothing: it is
    taken to share what all that came later do.
    """
    found = [call.cached_tokens + finds_all * call.recomputed_tokens for call in calls]
    if not found:
        return []
    first_ms = calls[0].wall_ms if calls[0].ttft_ms is None else calls[0].ttft_ms
    num_early = sum(call.began_at < calls[0].began_at + first_ms / 1e3 for call in calls)
    common = min(found[num_early:], default=0)
    return [max(found), *(max(n, common) for n in found[1:num_early]), *found[max(num_early, 1) :]]


def _seconds(call: CallFacts, *parts: str) -> float:
    return sum(call.parts.get(part, 0.0) for part in parts) / 1e3


def _leaders(calls: Sequence[CallFacts]) -> list[int | None]:
    """Return for each call which one ended just before it came; each leads one call at most."""
    leaders: list[int | None] = []
    free: dict[int, float] = {}  # ends of calls that nobody has followed
    for i, call in enumerate(calls):
        ended = [j for j, end in free.items() if 0 <= call.began_at - end <= _FOLLOWS_S]
        leader = max(ended, key=lambda j: free[j], default=None)
        if leader is not None:
            del free[leader]
        leaders.append(leader)
        free[i] = _end(call)
        free = {j: end for j, end in free.items() if end >= call.began_at - _FOLLOWS_S}
    return leaders


def _end(call: CallFacts) -> float:
    return call.began_at + call.wall_ms / 1e3
