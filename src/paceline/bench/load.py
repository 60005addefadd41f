"""Load: sends a workload to one target, open or closed loop, and records what comes back."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass

from paceline.bench.answer import Answer
from paceline.bench.arrivals import Arrivals, Closed
from paceline.bench.conversation import Conversation, Message, Turn, Workload
from paceline.bench.exchange import Exchange
from paceline.bench.http import ConnectionBrokenError, send
from paceline.bench.probe import Probe
from paceline.bench.recorder import Recorder
from paceline.bench.target import Target

_LEAD_S = 0.05  # between the start and the first request
_SPIN_S = 0.0015  # event loops round their timers to milliseconds: the last one is polled
_MAX_SPIN_RATE = 100.0
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
_MAX_PREPARED = 4096
_MAX_COUNTED = 1_000_000  # of arrivals that were not sent; the rate tells the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run ends, and what of it is measured. Warm-up comes before both limits."""

    num_requests: int | None = None
    duration_s: float | None = None
    warmup_s: float = 0.0
    warmup_requests: int = 0
    drain_s: float = 0.0  # after `duration_s`, for answers that are still coming
    timeout_s: float = 600.0
    max_open: int = 4096


class Source:
    """Hands out conversations in order; the first ones are made before the clock runs."""

    def __init__(self, workload: Workload, seed: str, num_prepared: int) -> None:
        self._workload = workload
        self._seed = seed
        self._next = 0
        count = min(num_prepared, _MAX_PREPARED)
        self._prepared = [workload.conversation(seed, idx) for idx in range(count)]

    def take(self) -> tuple[int, Conversation]:
        idx = self._next
        self._next += 1
        if idx < len(self._prepared):
            return idx, self._prepared[idx]
        return idx, self._workload.conversation(self._seed, idx)


class Load:
    """One run. `stop()` ends it early; what was measured until then stays."""

    def __init__(
        self,
        target: Target,
        source: Source,
        load: Arrivals | Closed,
        limits: Limits,
        recorder: Recorder,
        *,
        seed: str,
        on_tick: Callable[[], None] | None = None,
        keeps_text: bool = False,
    ) -> None:
        self.recorder = recorder
        self.probe = Probe(on_tick)
        self.num_open = 0
        self._target = target
        self._source = source
        self._load = load
        self._limits = limits
        self._seed = seed
        self._keeps_text = keeps_text
        self._num_sent = 0
        self._has_ended_arrivals = False
        self._arriving: Iterator[float] = iter(())
        self._held_at: float | None = None  # due, and waiting for its moment or for room
        self._begin = 0.0
        self._stop = asyncio.Event()
        self._is_cut_short = False
        self._room = asyncio.Semaphore(limits.max_open)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """End now: what is open is cut, and nothing is waited for."""
        self._is_cut_short = True
        self._stop.set()

    async def run(self) -> None:
        self._begin = self.recorder.epoch = time.perf_counter() + _LEAD_S
        window, limits = self.recorder.window, self._limits
        if not limits.warmup_requests:
            window.start = self._begin + limits.warmup_s
        if limits.duration_s is not None and math.isfinite(window.start):
            self._end_at(window.start + limits.duration_s)
        self.probe.start()
        gc.freeze()  # what is there stays: collections then look at a run's own objects alone
        try:
            await self._send_all()
            await self._finish()
        finally:
            gc.unfreeze()
            await self.probe.stop()
        if self._failure is not None:
            raise self._failure

    def _end_at(self, moment: float) -> None:
        self.recorder.window.end = moment
        asyncio.get_running_loop().call_later(moment - time.perf_counter(), self._stop.set)

    async def _send_all(self) -> None:
        """Send until all is sent and answered, or until the stop."""
        dispatcher = asyncio.create_task(self._dispatch())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({dispatcher, stopped}, return_when=asyncio.FIRST_COMPLETED)
        while self._tasks and not self._stop.is_set():
            await asyncio.wait({stopped, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in (dispatcher, stopped):
            task.cancel()
        results = await asyncio.gather(dispatcher, stopped, return_exceptions=True)
        bugs = [r for r in results if isinstance(r, Exception)]
        self._failure = self._failure or (bugs[0] if bugs else None)

    async def _finish(self) -> None:
        """Close the window, give late answers their time, cut the rest."""
        window, now = self.recorder.window, time.perf_counter()
        if self._is_cut_short or self._has_ended_arrivals or self._is_all_sent():
            window.end = min(window.end, now)  # the count, or the trace, came to its end first
        if self._tasks and self._limits.drain_s and not self._is_cut_short:
            self._stop.clear()
            stopped = asyncio.create_task(self._stop.wait())
            drained = asyncio.create_task(asyncio.wait(set(self._tasks)))
            await asyncio.wait(
                {stopped, drained},
                timeout=self._limits.drain_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            stopped.cancel()
            drained.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.recorder.num_unsent += self._num_never_sent()

    async def _dispatch(self) -> None:
        if isinstance(self._load, Closed):
            for _ in range(self._load.concurrency):
                self._spawn(self._user())
            return
        rate = self._load.rate
        polls = rate is None or rate <= _MAX_SPIN_RATE
        self._arriving = self._arrivals(self._load)
        for at in self._arriving:
            self._held_at = at
            await self._room.acquire()
            await _until(at, polls=polls)
            if self._is_over():
                return
            self._held_at = None
            idx, conversation = self._source.take()
            self._spawn(self._guest(idx, conversation, at))
            await asyncio.sleep(0)  # let it send, and count, before the next is looked at

    def _arrivals(self, load: Arrivals) -> Iterator[float]:
        for at in load.times(self._seed):
            moment = self._begin + at
            if moment >= self.recorder.window.end or self._is_all_sent():
                return
            yield moment
        self._has_ended_arrivals = True

    def _num_never_sent(self) -> int:
        """Return how many arrivals were due in the window and did not get their turn.

        The client had as many requests open as it may, or was late: either way a request that
        nobody answered.
        """
        window, held = self.recorder.window, [] if self._held_at is None else [self._held_at]
        if isinstance(self._load, Closed) or not math.isfinite(window.start):
            return 0
        limit = self._limits.num_requests
        most = math.inf
        if limit is not None:
            most = max(0, limit + self._limits.warmup_requests - self._num_sent)
        num, at = 0, window.start
        for at in itertools.chain(held, self._arriving):
            if at >= window.end or num >= min(most, _MAX_COUNTED):
                break
            num += at >= window.start
        else:
            return num
        if num == _MAX_COUNTED < most and self._load.rate is not None:
            num += round(self._load.rate * max(0.0, window.end - at))
        return int(min(num, most))

    def _is_all_sent(self) -> bool:
        limit = self._limits.num_requests
        return limit is not None and self._num_sent >= limit + self._limits.warmup_requests

    def _is_over(self) -> bool:
        """True once nothing new may be sent: answers may still come, for `drain_s`."""
        return self._is_all_sent() or time.perf_counter() >= self.recorder.window.end

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop()

    async def _guest(self, idx: int, conversation: Conversation, at: float) -> None:
        """One conversation of an open loop."""
        try:
            await self._converse(idx, conversation, at)
        finally:
            self._room.release()

    async def _user(self) -> None:
        """One user of a closed loop: the next request follows the last answer."""
        while not self._is_over():
            idx, conversation = self._source.take()
            last = await self._converse(idx, conversation, max(self._begin, time.perf_counter()))
            if last is not None and last.outcome in ("refused", "broken"):
                # A client that comes back at once would measure nothing but its own hurry.
                pause = last.retry_after_s if last.outcome == "refused" else None
                again = time.perf_counter() + min(pause or _BACKOFF_S, _MAX_BACKOFF_S)
                await _until(min(again, self.recorder.window.end), polls=False)

    async def _converse(self, idx: int, conversation: Conversation, due: float) -> Exchange | None:
        """Run the turns of a conversation; a turn that fails, or the run's end, is the last."""
        history: list[Message] = []
        exchange = None
        for turn_idx, turn in enumerate(conversation.turns):
            if self._is_all_sent() or due >= self.recorder.window.end:
                break
            await _until(due, polls=False)
            if self._is_over():
                self.recorder.num_unsent += not self._is_all_sent()
                break
            history.extend(turn.messages)
            exchange = self._open(idx, conversation.kind, turn_idx, turn, due)
            is_last = turn_idx + 1 == len(conversation.turns)
            exchange.answer.keeps_text |= not is_last and turn.reply is None
            await self._ask(exchange, history)
            if exchange.outcome != "ok":
                break
            reply = exchange.answer.text if turn.reply is None else turn.reply
            history.append({"role": "assistant", "content": reply})
            if not is_last:
                due = exchange.ended_at + conversation.turns[turn_idx + 1].think_s
        return exchange

    def _open(self, idx: int, kind: str, turn_idx: int, turn: Turn, due: float) -> Exchange:
        limits, window = self._limits, self.recorder.window
        is_warmup = self._num_sent < limits.warmup_requests
        self._num_sent += 1
        if not is_warmup and math.isinf(window.start):
            window.start = due
            if limits.duration_s is not None:
                self._end_at(due + limits.duration_s)
        is_warmup = is_warmup or due < window.start
        if is_warmup and not limits.warmup_requests:
            self._num_sent -= 1  # a warm-up by time does not use up the count
        keeps_text = self._keeps_text or turn.expects != "text"
        return Exchange(
            idx=idx, kind=kind, turn_idx=turn_idx, turn=turn, scheduled_at=due,
            answer=Answer(keeps_text=keeps_text), is_warmup=is_warmup,
        )  # fmt: skip

    async def _ask(self, exchange: Exchange, messages: list[Message]) -> None:
        if self._keeps_text:
            exchange.prompt_text = "\n".join(str(message["content"]) for message in messages)
        request = self._target.request(exchange.turn, messages)
        exchange.sent_at = time.perf_counter()
        self.num_open += 1
        self.recorder.note_open(self.num_open, exchange.sent_at)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                ended_at = await send(self._target.origin, request, exchange.answer)
            exchange.close(ended_at)
        except ConnectionBrokenError as error:
            exchange.close(time.perf_counter(), "broken", str(error))
        except TimeoutError:
            limit = f"no end within {self._limits.timeout_s:g} s"
            exchange.close(time.perf_counter(), "timeout", limit)
        except asyncio.CancelledError:
            exchange.close(time.perf_counter(), "cut")
            raise
        finally:
            self.recorder.note_open(self.num_open, exchange.ended_at)
            self.num_open -= 1
            self.recorder.add(exchange)


async def _until(moment: float, *, polls: bool) -> None:
    """Return at `moment`, to a tenth of a millisecond with `polls`."""
    left = moment - time.perf_counter()
    if not polls:
        if left > 0:
            await asyncio.sleep(left)
        return
    if left > _SPIN_S:
        await asyncio.sleep(left - _SPIN_S)
    while time.perf_counter() < moment:
        await asyncio.sleep(0)
