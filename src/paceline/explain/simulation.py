"""Simulation: a load on the engine's own scheduler, with a clock that only steps move.

Scheduler, policy, block pool and prefix cache are those of the engine, so who is admitted, waits,
is preempted and shares a step is as it would be; what a step takes comes from the costs of steps.
Left out: Python outside of the steps, text, sending, slow clients, calls that were no answers,
priorities and keys, KV tiers, and other models. Choices of a call are all as long as the mean one.
A call is timed from when the engine has it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from paceline.engine.block_pool import BlockPool
from paceline.engine.known_costs import Points
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.sequence import Sequence
from paceline.errors import ParameterError
from paceline.explain.causes import Metric
from paceline.explain.facts import ServerFacts
from paceline.explain.load import Asked, prompts_of
from paceline.policies.base import Policy, load_policy
from paceline.types import Request, SamplingParams

_SHARED = 0  # the token of a beginning that nobody of the load had first; call i has i + 1


class Costs(Protocol):
    """What steps take."""

    @property
    def python_s(self) -> float:
        """What of a step is not its forward: policies learn nothing of it."""

    @property
    def known(self) -> Points:
        """What the engine knows of its steps before the first one."""

    def seconds(self, num_decode: float, num_prefill: int, mean_keys: float | None = None) -> float:
        """Return the time of a step with so many sequences that decode and tokens of prompts.

        `mean_keys` are those that a token of the step attends to.
        """


class Outcomes(Struct, frozen=True, kw_only=True):
    """The latencies of all calls of a load, each metric ascending, in milliseconds."""

    ttft_ms: Seq[float]
    tpot_ms: Seq[float]

    def at(self, metric: Metric, percentile: int) -> float | None:
        """Return a percentile (the nearest rank), None where no call has the metric."""
        values = self.ttft_ms if metric == "ttft" else self.tpot_ms
        return values[round(percentile / 100 * (len(values) - 1))] if values else None


def simulate(load: Seq[Asked], server: ServerFacts, costs: Costs) -> Outcomes | None:
    """Return what a server like this makes of the load.

    None where its memory cannot hold a call, or this build does not have its policy.
    """
    size = server.block_size
    blocks = [-(-(asked.num_prompt + asked.num_steps) // size) for asked in load]
    if max(blocks, default=0) > server.num_blocks:
        return None
    try:
        policy = load_policy(server.policy)
    except ParameterError:
        return None
    # More than all calls together never matters, and a recording can tell of any pool.
    num_wanted = sum(n * asked.num_choices for n, asked in zip(blocks, load, strict=True))
    server = replace(server, num_blocks=min(server.num_blocks, num_wanted))
    run = _Run(load, server, policy, costs)
    run.finish()
    return run.outcomes()


class _Silent:
    """Stands for what chooses tokens and makes text of them."""

    def commit(self, token_id: int, /) -> None:
        pass

    def feed(self, token_id: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


_SILENT = _Silent()


class _Run:
    def __init__(self, load: Seq[Asked], server: ServerFacts, policy: Policy, costs: Costs) -> None:
        self._load, self._costs = load, costs
        pool = BlockPool(server.num_blocks)
        size = server.block_size
        self._scheduler = Scheduler(
            policy=policy,
            pool=pool,
            block_size=size,
            max_num_seqs=server.max_num_seqs,
            max_tokens=server.max_batched_tokens,
            cache=PrefixCache(pool, block_size=size) if server.prefix_cache else None,
        )
        for num_tokens, seconds in costs.known:
            policy.observe(num_tokens, seconds)
        self._now_s = 0.0
        self._due: list[tuple[float, int]] = []  # a heap: when a call comes, and which
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._prompts = prompts_of(load, lambda i, count: [_SHARED if i < 0 else i + 1] * count)
        self._place: dict[int, int] = {}  # number of a sequence -> place of its call in the load
        self._came_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._end_s: dict[int, float] = {}
        self._num_open = [asked.num_choices for asked in load]
        for i, asked in enumerate(load):
            if asked.after is None:
                heapq.heappush(self._due, (asked.delay_s + asked.ready_s, i))
            else:
                self._followers[asked.after].append(i)

    def finish(self) -> None:
        """Run all of the load."""
        while self._due or self._scheduler.has_work:
            while self._due and self._due[0][0] <= self._now_s:
                self._come(*heapq.heappop(self._due))
            schedule = self._scheduler.schedule(round(self._now_s * 1e9))
            if schedule.chunks:
                self._step(schedule)
            else:
                self._now_s = self._due[0][0]  # nobody is here: go on to the next who comes

    def outcomes(self) -> Outcomes:
        ttft, tpot = [], []
        for i, first_s in self._first_s.items():
            if not self._load[i].has_content:
                continue
            ttft.append((first_s - self._came_s[i]) * 1e3)
            num_gaps = self._load[i].num_output - 1
            if num_gaps:
                tpot.append((self._end_s[i] - first_s) / num_gaps * 1e3)
        return Outcomes(ttft_ms=sorted(ttft), tpot_ms=sorted(tpot))

    def _come(self, at_s: float, i: int) -> None:
        asked = self._load[i]
        self._came_s[i] = at_s
        prompt = tuple(self._prompts[i])
        request = Request(id=str(i), prompt_token_ids=prompt, params=SamplingParams())
        number = len(self._place)
        self._place.update((number + choice, i) for choice in range(asked.num_choices))
        self._scheduler.add(self._sequence(request, number))

    def _sequence(self, request: Request, number: int) -> Sequence:
        """Return a choice of a call, before its first token."""
        i, prompt = self._place[number], list(request.prompt_token_ids)
        return Sequence(
            request=request, index=0, number=number, token_ids=prompt,
            max_len=len(prompt) + self._load[i].num_steps,
            sampler=_SILENT, decoder=_SILENT, matcher=None, ends={},
            arrival_ns=round(self._came_s[i] * 1e9),
        )  # fmt: skip

    def _step(self, schedule: Schedule) -> None:
        num_tokens, num_prefill = schedule.num_tokens, schedule.num_prefill_tokens
        num_keys = sum(n * seq.num_computed + n * (n + 1) / 2 for seq, n in schedule.chunks)
        step_s = self._costs.seconds(num_tokens - num_prefill, num_prefill, num_keys / num_tokens)
        self._now_s += step_s
        self._scheduler.observe(num_tokens, max(step_s - self._costs.python_s, 0.0))
        for seq, num_tokens in schedule.chunks:
            seq.num_computed += num_tokens
        ready = [seq for seq, _ in schedule.chunks if seq.num_computed == len(seq.token_ids)]
        # First all that begin take their seats, then those that end leave theirs.
        for choice in [one for seq in ready for one in (seq, *self._forked(seq))]:
            self._give_token(choice)

    def _forked(self, seq: Sequence) -> list[Sequence]:
        """Return the choices that have waited for this one's prompt, which is computed now."""
        i = self._place[seq.number]
        if i in self._first_s:
            return []
        self._first_s[i] = self._now_s
        numbers = range(seq.number + 1, seq.number + self._load[i].num_choices)
        others = [self._sequence(seq.request, number) for number in numbers]
        for other in others:
            self._scheduler.fork(seq, other)
        return others

    def _give_token(self, seq: Sequence) -> None:
        i = self._place[seq.number]
        seq.append_token(i + 1, round(self._now_s * 1e9))
        if seq.finish_reason is None:
            return
        self._scheduler.remove(seq)
        self._num_open[i] -= 1
        if self._num_open[i]:
            return
        self._end_s[i] = self._now_s
        told_s = self._now_s + self._load[i].tail_s
        for follower in self._followers[i]:
            asked = self._load[follower]
            heapq.heappush(self._due, (told_s + asked.delay_s + asked.ready_s, follower))
