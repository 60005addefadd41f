"""PlainSteps: steps in which the same sequences decode a token each, booked many at a time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.measure.ledger import Ledger, Part
from paceline.measure.step_cost import StepCost
from paceline.measure.steps import StepCounters, StepLog, StepRecord

# Readers in other threads are so far behind at most, and a step longer than the second.
MAX_NOTED = 16  # steps
MAX_NOTED_NS = 100_000_000

if TYPE_CHECKING:
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence


class PlainStep(Struct, gc=False):
    """A step like the one before it: what there is to book of it."""

    schedule: Schedule
    scheduled_ns: int
    built_ns: int
    work_ns: int
    forward_ns: int
    sampled_ns: int = 0
    num_sampled: int = 0
    last_token_ns: int = 0  # of its sequences, before the step
    end_ns: int = 0


class PlainSteps:
    """What is noted and not booked yet.

    After a step the caches are full of weights, so that the first booking takes ten times what the
    next ones do: a step costs little to note, and the notes are booked in one go.
    """

    def __init__(self) -> None:
        self.current: PlainStep | None = None  # the step in progress, while it is a plain one
        self._ended: list[PlainStep] = []
        self._contexts: list[int] = []  # of the sequences, in the first of those steps

    @property
    def is_empty(self) -> bool:
        return self.current is None and not self._ended

    def begin(self, step: PlainStep) -> None:
        """Precondition: `num_computed` of its sequences does not count the step yet."""
        if not self._ended:
            self._contexts = [seq.num_computed for seq, _ in step.schedule.chunks]
        self.current = step

    def sampled(self, seqs: Seq[Sequence], now_ns: int) -> bool:
        """Note that each of `seqs` has its token; False if the step in progress is not plain."""
        step = self.current
        if step is None:
            return False
        step.sampled_ns, step.num_sampled = now_ns, len(seqs)
        step.last_token_ns = seqs[0].last_token_ns
        return True

    def end(self, now_ns: int) -> bool:
        """Note the end of the step in progress; return whether it is time to book."""
        step = self.current
        assert step is not None
        step.end_ns, self.current = now_ns, None
        self._ended.append(step)
        return len(self._ended) >= MAX_NOTED or (
            now_ns - self._ended[0].schedule.start_ns > MAX_NOTED_NS
        )

    def take(self) -> tuple[list[PlainStep], PlainStep | None, list[int]]:
        """Forget and return the ended steps, that in progress, and the contexts in the first."""
        taken = self._ended, self.current, self._contexts
        self._ended, self.current = [], None
        return taken


def book_plain(
    steps: Seq[PlainStep],
    contexts: Seq[int],
    *,
    common: Ledger,
    before: StepRecord,
    cost: StepCost,
    counters: StepCounters,
    log: StepLog,
) -> StepRecord:
    """Book ended steps that follow `before`, all at once; return the record of the last one.

    `common.short_ns` is left to the caller. The sums are those of booking each by itself.
    """
    ns = [0] * len(common.ns)
    mark_ns, record = common.mark_ns, before
    for num_earlier, step in enumerate(steps):
        schedule = step.schedule
        start_ns, num_tokens = schedule.start_ns, schedule.num_tokens
        duration = step.work_ns - step.built_ns
        cost.observe(num_tokens, duration)
        own = int(duration * cost.share(1, num_tokens))
        turn_ns = schedule.turn_ns
        ns[Part.TURN] += turn_ns
        ns[Part.ENGINE] += step.built_ns - mark_ns - turn_ns
        ns[Part.DECODE] += own
        ns[Part.DECODE_OTHERS] += duration - own
        ns[Part.GIL_WAIT] += step.forward_ns - step.work_ns
        ns[Part.SAMPLE] += step.sampled_ns - step.forward_ns
        ns[Part.DETOKENISE] += step.end_ns - step.sampled_ns
        mark_ns = step.end_ns
        num_keys, kv_bytes = counters.count_decodes([n + num_earlier for n in contexts])
        counters.gap_s.observe((step.sampled_ns - step.last_token_ns) / 1e9, step.num_sampled)
        record = StepRecord(
            number=record.number + 1, start_ns=start_ns, scheduled_ns=step.scheduled_ns,
            built_ns=step.built_ns, work_ns=step.work_ns, forward_ns=step.forward_ns,
            sampled_ns=step.sampled_ns, end_ns=mark_ns, num_tokens=num_tokens,
            num_sampled=step.num_sampled, num_keys=num_keys, kv_bytes=kv_bytes,
            chunks=before.chunks,
        )  # fmt: skip
        log.add(record)
        counters.count_step(record)
    for part, spent_ns in enumerate(ns):
        common.ns[part] += spent_ns
    common.mark_ns, common.last_step = mark_ns, record.number
    common.num_steps += len(steps)
    return record
