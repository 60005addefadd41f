"""Requests over HTTP as clients send them, and the times at which their tokens arrive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

TTFT_LIMIT_S = 0.5
TPOT_LIMIT_S = 0.05
_RESOLUTION = 1.1  # the search for a rate ends when its bounds are this close
_MIN_RATE = 0.05
_TIMEOUT_S = 3600.0  # of one request
_NUM_BEFORE_LONG = 16  # tokens of each stream before the long prompt arrives
_LONG_STREAM = 1000  # tokens that a stream beside a long prompt may take


@dataclass(slots=True)
class Arrivals:
    """When a request was sent and when its tokens arrived, in seconds of one clock."""

    sent_s: float
    stamps: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.sent_s

    def tpot_s(self, num_tokens: int) -> float:
        return (self.stamps[-1] - self.stamps[0]) / max(1, num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Client:
    """Sends prompts to one server on this machine."""

    port: int
    model: str

    async def complete(
        self, prompt: Sequence[int], num_tokens: int, arrivals: Arrivals | None = None
    ) -> Arrivals:
        """Stream a greedy completion of `num_tokens`; `arrivals` is filled as they come."""
        body = json.dumps({
            "model": self.model, "prompt": list(prompt), "max_tokens": num_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }).encode()  # fmt: skip
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        result = arrivals or Arrivals(0.0)
        async with asyncio.timeout(_TIMEOUT_S):
            await self._send(head.encode() + body, result)
        if not result.stamps:
            raise RuntimeError("the server sent no token")
        return result

    async def _send(self, request: bytes, result: Arrivals) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            result.sent_s = time.perf_counter()
            writer.write(request)
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the server answered {status!r}: {await reader.read(2000)!r}")
            while line := await reader.readline():
                if line.startswith(b"data: {") and b'"text":""' not in line:
                    result.stamps.append(time.perf_counter())
        finally:
            writer.close()

    def settle(self, prompt: Sequence[int]) -> None:
        """Return when the server has time for a request again."""
        asyncio.run(self.complete(prompt[:16], 1))


def meets(ttfts_s: Sequence[float], tpots_s: Sequence[float]) -> bool:
    """Return whether the 95th percentile of both is within its limit (nearest rank)."""
    return percentile(ttfts_s, 0.95) <= TTFT_LIMIT_S and percentile(tpots_s, 0.95) <= TPOT_LIMIT_S


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def highest_rate(passes: Callable[[float], bool], *, start: float, factor: float = 2.0) -> float:
    """Return the highest rate that passes, within 10 %; 0 where not even the lowest does.

    Doubles or halves from `start` (by `factor`) until it has a bound on both sides, then bisects.
    """
    low = high = None
    rate = start
    while rate >= _MIN_RATE:
        if passes(rate):
            low = rate
        else:
            high = rate
        if low is not None and high is not None:
            if high / low <= _RESOLUTION:
                return low
            rate = math.sqrt(low * high)
        else:
            rate = rate * factor if high is None else rate / factor
    return 0.0


def passes_at(
    client: Client, rate: float, prompts: Sequence[Sequence[int]], *, num_tokens: int, seed: int
) -> bool:
    """Send `prompts` at Poisson arrivals of `rate` a second; return whether they meet the limits.

    The same seed gives the same arrivals, stretched by the rate. Ends early once too many failed.
    """
    rng = random.Random(seed)
    times = list(itertools.accumulate(rng.expovariate(1.0) / rate for _ in prompts))
    client.settle(prompts[0])
    return asyncio.run(_poisson(client, times, prompts, num_tokens))


async def _poisson(
    client: Client, times: Sequence[float], prompts: Sequence[Sequence[int]], num_tokens: int
) -> bool:
    num_allowed = len(prompts) - math.ceil(0.95 * len(prompts))
    late: set[int] = set()
    results = [Arrivals(0.0) for _ in prompts]
    hopeless = asyncio.Event()

    def judge(idx: int) -> None:
        if not results[idx].stamps:
            late.add(idx)
        if len(late) > num_allowed:
            hopeless.set()

    async def send(idx: int) -> None:
        await asyncio.sleep(times[idx])
        asyncio.get_running_loop().call_later(TTFT_LIMIT_S, judge, idx)
        await client.complete(prompts[idx], num_tokens, results[idx])

    if not await _until(hopeless, *(send(idx) for idx in range(len(prompts)))):
        return False
    return meets([r.ttft_s for r in results], [r.tpot_s(num_tokens) for r in results])


async def _until(event: asyncio.Event, *work: Coroutine[Any, Any, object]) -> bool:
    """Run `work`; return False, with the rest cancelled, where `event` is set before it ends."""
    tasks = asyncio.gather(*work)
    stop = asyncio.ensure_future(event.wait())
    both: set[asyncio.Future[Any]] = {tasks, stop}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if tasks.done():
        await tasks  # raises what failed
        return True
    tasks.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks
    return False


def ttft_alone(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Return the least time to first token of requests that have the server to themselves."""
    return min(asyncio.run(client.complete(prompt, num_tokens)).ttft_s for prompt in prompts)


def throughput(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
    """Return the requests a second at which the server answers all `prompts`, sent at once."""

    async def all_at_once() -> None:
        await asyncio.gather(*(client.complete(prompt, num_tokens) for prompt in prompts))

    start = time.perf_counter()
    asyncio.run(all_at_once())
    return len(prompts) / (time.perf_counter() - start)


def long_prompt_beside(
    client: Client, streams: Sequence[Sequence[int]], late: Sequence[int]
) -> tuple[float, float]:
    """Return (longest gap of the decoding `streams` in s, TTFT of the prompt that comes late)."""
    client.settle(late)
    return asyncio.run(_beside(client, streams, late))


async def _beside(
    client: Client, streams: Sequence[Sequence[int]], late: Sequence[int]
) -> tuple[float, float]:
    running = [Arrivals(0.0) for _ in streams]
    tasks = [
        asyncio.create_task(client.complete(prompt, _LONG_STREAM, arrivals))
        for prompt, arrivals in zip(streams, running, strict=True)
    ]
    while min(len(arrivals.stamps) for arrivals in running) < _NUM_BEFORE_LONG:
        await asyncio.sleep(0.005)
        for task in tasks:
            if task.done():
                task.result()  # raises what failed
                raise RuntimeError("a stream ended before the long prompt arrived")
    long = await client.complete(late, 1)
    if any(task.done() for task in tasks):
        raise RuntimeError("a stream ended before the long prompt had its first token")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    end = long.stamps[0]
    return max(longest_gap(a.stamps, long.sent_s, end) for a in running), long.ttft_s


def longest_gap(stamps: Sequence[float], start: float, end: float) -> float:
    """Return the longest wait for a token that touches [start, end]; one still open counts."""
    times = [*(t for t in stamps if t <= end), end]
    return max(b - a for a, b in itertools.pairwise(times) if b > start)
