"""Load: sends a workload to one target, open or closed loop, and records what comes back.

`Course` says what may be sent and what is measured, `Schedule` when an open loop sends. Here are
the tasks that do so: users of a closed loop or guests of an open one, each a conversation at a
time, each turn of it one exchange.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine

from paceline.bench.answer import Answer
from paceline.bench.arrivals import Arrivals, Closed
from paceline.bench.conversation import Conversation, Message, Source, Turn
from paceline.bench.course import Course, Limits
from paceline.bench.exchange import Exchange
from paceline.bench.http import ConnectionBrokenError, send
from paceline.bench.probe import Probe
from paceline.bench.recorder import Recorder
from paceline.bench.schedule import Schedule, until
from paceline.bench.target import Target

_LEAD_S = 0.05  # between the start and the first request
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
_MAX_COUNTED = 1_000_000  # of arrivals that were not sent; the rate tells the rest


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
        self._stop = asyncio.Event()
        self._is_cut_short = False
        self._course = Course(limits, recorder.window, self._stop.set)
        self._schedule: Schedule | None = None  # of an open loop
        self._room = asyncio.Semaphore(limits.max_open)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """End now: what is open is cut, and nothing is waited for."""
        self._is_cut_short = True
        self._stop.set()

    async def run(self) -> None:
        self.recorder.epoch = time.perf_counter() + _LEAD_S
        self._course.begin(self.recorder.epoch)
        self.probe.start()
        gc.freeze()  # what is there stays: collections then look at a run's own objects alone
        try:
            await self._unless_stopped(self._send_all())
            self._close_window()
            if self._limits.drain_s and not self._is_cut_short:
                self._stop.clear()
                await self._unless_stopped(self._answers(), timeout_s=self._limits.drain_s)
            await self._cut()
        finally:
            gc.unfreeze()
            await self.probe.stop()
        if self._failure is not None:
            raise self._failure

    async def _unless_stopped(
        self, work: Coroutine[None, None, None], timeout_s: float | None = None
    ) -> None:
        """Wait for `work`. A stop or the time-out cancels it."""
        both = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        for result in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(result, Exception):
                self._failure = self._failure or result

    async def _send_all(self) -> None:
        """Return once all is sent and answered."""
        if isinstance(self._load, Closed):
            for _ in range(self._load.concurrency):
                self._spawn(self._user())
        else:
            self._schedule = Schedule(self._load, self._seed, self._course)
            await self._send_arrivals(self._schedule)
        await self._answers()

    async def _send_arrivals(self, schedule: Schedule) -> None:
        for due in schedule:
            await self._room.acquire()
            await schedule.wait(due)
            if self._course.is_over:
                return
            schedule.release()
            idx, conversation = self._source.take()
            self._spawn(self._guest(idx, conversation, due))
            await asyncio.sleep(0)  # let it send, and count, before the next is looked at

    async def _answers(self) -> None:
        """Return once nothing is open."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _close_window(self) -> None:
        """End it now where the count, the trace or a stop came before the duration's end."""
        is_at_its_end = self._course.is_all_sent or (
            self._schedule is not None and self._schedule.has_ended
        )
        if self._is_cut_short or is_at_its_end:
            self.recorder.window.end = min(self.recorder.window.end, time.perf_counter())

    async def _cut(self) -> None:
        """End what is open, and count what never was."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._schedule is not None:
            self.recorder.num_unsent += self._schedule.num_unsent(_MAX_COUNTED)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop()

    async def _guest(self, idx: int, conversation: Conversation, due: float) -> None:
        """One conversation of an open loop."""
        try:
            await self._converse(idx, conversation, due)
        finally:
            self._room.release()

    async def _user(self) -> None:
        """One user of a closed loop: the next request follows the last answer."""
        while not self._course.is_over:
            idx, conversation = self._source.take()
            due = max(self._course.begin_at, time.perf_counter())
            last = await self._converse(idx, conversation, due)
            if last is not None and last.outcome in ("refused", "broken"):
                # A client that comes back at once would measure nothing but its own hurry.
                pause = last.retry_after_s if last.outcome == "refused" else None
                again = time.perf_counter() + min(pause or _BACKOFF_S, _MAX_BACKOFF_S)
                await until(min(again, self.recorder.window.end))

    async def _converse(self, idx: int, conversation: Conversation, due: float) -> Exchange | None:
        """Run the turns of a conversation; a turn that fails, or the run's end, is the last."""
        history: list[Message] = []
        exchange = None
        for turn_idx, turn in enumerate(conversation.turns):
            if self._course.is_all_sent or due >= self.recorder.window.end:
                break
            await until(due)
            if self._course.is_over:
                self.recorder.num_unsent += not self._course.is_all_sent
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
        keeps_text = self._keeps_text or turn.expects != "text"
        return Exchange(
            idx=idx, kind=kind, turn_idx=turn_idx, turn=turn, scheduled_at=due,
            answer=Answer(keeps_text=keeps_text), is_warmup=self._course.admit(due),
        )  # fmt: skip

    async def _ask(self, exchange: Exchange, messages: list[Message]) -> None:
        """Send one request; `exchange` and the recorder know how it ended."""
        if self._keeps_text:
            exchange.prompt_text = "\n".join(str(message["content"]) for message in messages)
        request = self._target.request(exchange.turn, messages)
        exchange.num_bytes = len(request)
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
