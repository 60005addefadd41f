"""Load: what was asked of a server, in a form that can be asked again."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from paceline.explain.facts import CallFacts

_FOLLOWS_S = 0.02  # a client that asks again at once needs so long at most; a person does not


class Asked(Struct, frozen=True, kw_only=True):
    """One call: its lengths, and when it comes.

    `after` is the place in the load of the call whose end it waited for, as a client that asks one
    thing after the other does; None where it came by itself, `delay_s` after the load's begin.
    """

    num_prompt: int
    num_shared: int  # first tokens of the prompt, of a beginning that all of the load share
    num_output: int
    num_steps: int  # that gave those tokens: fewer where guesses were right
    after: int | None
    delay_s: float


def load_of(calls: Sequence[CallFacts]) -> list[Asked]:
    """Return the load of recorded calls, in the order in which they came.

    Which beginnings the prompts had in common is not known, only how long they were: they are
    taken for one, and the first call of all begins with it, too.
    """
    calls = sorted(calls, key=lambda call: call.began_at)
    longest = max((call.repeated_tokens for call in calls), default=0)
    leaders = _leaders(calls)
    load = []
    for i, call in enumerate(calls):
        leader = leaders[i]
        since = calls[0].began_at if leader is None else _end(calls[leader])
        num_output = max(call.completion_tokens, 1)
        load.append(
            Asked(
                num_prompt=max(call.prompt_tokens, 1),
                num_shared=min(longest if i == 0 else call.repeated_tokens, call.prompt_tokens),
                num_output=num_output,
                num_steps=max(num_output - call.unstepped_tokens, 1),
                after=leader,
                delay_s=call.began_at - since,
            )
        )
    return load


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
