"""StepRecorder: books the engine's time, step by step, in the ledgers of its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from paceline.measure.ledger import Ledger, Part
from paceline.measure.plain_steps import PlainStep, PlainSteps, book_plain
from paceline.measure.repeats import PromptRepeats
from paceline.measure.step_cost import StepCost
from paceline.measure.steps import Chunk, StepCounters, StepLog, StepRecord

if TYPE_CHECKING:
    from paceline.engine.scheduler import Schedule
    from paceline.engine.sequence import Sequence
    from paceline.measure.work import StepWork


class _Alone(NamedTuple):
    """A sequence of the step in progress with a ledger to itself."""

    seq: Sequence
    ledger: Ledger
    chunk: Chunk


class StepRecorder:
    """Divides each step among its sequences, and keeps the latest steps and running totals.

    A step's forward is divided by marginal cost: a sequence is charged what the step would have
    cost with its tokens alone (`StepCost`), the rest was lost to the others, and is laid to
    their charge by their tokens.

    Sequences that decode one token a step all spend a step alike. It is booked once for all of
    them, in a common ledger in which theirs have a share until something happens to them alone.
    Such steps are noted first, and booked many at a time (`PlainSteps`).
    """

    def __init__(self, work: StepWork | None = None) -> None:
        self.log = StepLog()
        self.counters = StepCounters(work)
        self._cost = StepCost()
        self._repeats = PromptRepeats()
        self._record = StepRecord()
        self._common = Ledger(begin_ns=0, mark_ns=0, short_ns=0)
        self._sharing: dict[Sequence, Chunk] = {}  # their chunk is the same in each step
        # The chunks of the step before, if all its sequences have a share.
        self._all_sharing: list[tuple[Sequence, int]] | None = None
        # Of the step in progress: all of it, and those that have ledgers of their own.
        self._scheduled: list[tuple[Sequence, int]] = []
        self._alone: list[_Alone] = []
        self._is_in_step = False
        self._plain = PlainSteps()
        # Time in which the queue's head lacked KV memory, up to the last schedule.
        self._short_ns = 0
        self._is_short = False
        self._schedule_ns = 0
        self._turn_ns = (0, 0)  # the last wait for a turn: its begin and end

    def successor(self) -> StepRecorder:
        """Return a recorder for the next engine of the model: it goes on with log and totals."""
        recorder = StepRecorder()
        recorder.log, recorder.counters = self.log, self.counters
        recorder._record = StepRecord(number=self._record.number)
        return recorder

    def open(self, begin_ns: int, now_ns: int) -> Ledger:
        ledger = Ledger(begin_ns=begin_ns, mark_ns=begin_ns, short_ns=0)
        ledger.spend(Part.ENGINE, now_ns)
        ledger.short_ns = self._short_until(now_ns)
        return ledger

    def turned(self, now_ns: int, turn_ns: int) -> None:
        self._turn_ns = now_ns - turn_ns, now_ns

    def ran(self, schedule: Schedule, *, scheduled_ns: int, built_ns: int, work_ns: int,
            forward_ns: int) -> None:  # fmt: skip
        if self._is_plain(schedule):
            self._plain.begin(PlainStep(schedule, scheduled_ns, built_ns, work_ns, forward_ns))
            return
        self.settle()
        self._ran(schedule, scheduled_ns, built_ns, work_ns, forward_ns)
        self._count_work(*self.counters.count_work(schedule.chunks))

    def _is_plain(self, schedule: Schedule) -> bool:
        return (
            schedule.chunks == self._all_sharing
            and schedule.is_short_of_kv == self._is_short
            and not schedule.draft_ns
        )

    def settle(self) -> None:
        """Book what is only noted. For the engine's thread, or while there is none."""
        if self._plain.is_empty:
            return
        ended, current, contexts = self._plain.take()
        if ended:
            self._record = book_plain(
                ended, contexts, common=self._common, before=self._record, cost=self._cost,
                counters=self.counters, log=self.log,
            )  # fmt: skip
            self._see_queue(ended[-1].schedule)
            self._common.short_ns = self._short_until(ended[-1].end_ns)
        if current is not None:  # it turns out to be more than a plain one
            self._ran(current.schedule, current.scheduled_ns, current.built_ns, current.work_ns,
                      current.forward_ns)  # fmt: skip
            self._count_work(*self.counters.count_decodes([n + len(ended) for n in contexts]))
            if current.sampled_ns:
                self._book_sampled(current.sampled_ns, current.num_sampled, current.last_token_ns)

    def _count_work(self, num_keys: int, kv_bytes: int) -> None:
        self._record.num_keys, self._record.kv_bytes = num_keys, kv_bytes

    def _ran(
        self, schedule: Schedule, scheduled_ns: int, built_ns: int, work_ns: int, forward_ns: int
    ) -> None:
        start_ns = schedule.start_ns
        self._see_queue(schedule)
        duration = work_ns - built_ns
        self._cost.observe(schedule.num_tokens, duration)
        self._scheduled, self._alone = schedule.chunks, []
        if schedule.chunks == self._all_sharing and not schedule.num_drafted:
            chunks = self._record.chunks
        else:
            chunks = self._sort(schedule, built_ns)
        ledgers = [alone.ledger for alone in self._alone]
        if self._sharing:
            ledgers.append(self._common)
            if schedule.turn_ns:
                self._common.spend(Part.ENGINE, start_ns - schedule.turn_ns)
                self._common.spend(Part.TURN, start_ns)
        for ledger in ledgers:
            if schedule.draft_ns:
                ledger.spend(Part.ENGINE, scheduled_ns - schedule.draft_ns)
                ledger.spend(Part.DRAFT, scheduled_ns)
            ledger.spend(Part.ENGINE, built_ns)
        self._divide(schedule.num_tokens, duration)
        for seq, ledger, chunk in self._alone:
            num_known = seq.num_computed + chunk.num_tokens - chunk.num_drafted
            ledger.num_seen = max(ledger.num_seen, num_known)
        number = self._record.number + 1
        for ledger in ledgers:
            ledger.mark_ns = work_ns
            ledger.spend(Part.GIL_WAIT, forward_ns)
            ledger.last_step = number
            ledger.num_steps += 1
        self._is_in_step = True
        self._record = StepRecord(
            number=number, start_ns=start_ns, scheduled_ns=scheduled_ns, built_ns=built_ns,
            work_ns=work_ns, forward_ns=forward_ns, num_tokens=schedule.num_tokens,
            draft_ns=schedule.draft_ns, chunks=chunks,
        )  # fmt: skip

    def _see_queue(self, schedule: Schedule) -> None:
        """Count the time since the schedule before this one, if memory was short in it."""
        if self._is_short:
            self._short_ns += schedule.start_ns - self._schedule_ns
        self._is_short, self._schedule_ns = schedule.is_short_of_kv, schedule.start_ns

    def _sort(self, schedule: Schedule, built_ns: int) -> tuple[Chunk, ...]:
        """Find out who goes on sharing, and book what the others did until the step."""
        before, self._sharing = self._sharing, {}
        chunks: list[Chunk] = []
        for seq, n in schedule.chunks:
            chunk = before.get(seq)
            if chunk is not None and n == 1 and seq.draft is None:
                self._sharing[seq] = chunk
            else:
                ledger = _ledger(seq)
                ledger.leave()
                self._book_begin(ledger, seq, schedule, built_ns)
                chunk = _chunk(seq, ledger, n)
                self._alone.append(_Alone(seq, ledger, chunk))
            chunks.append(chunk)
        for seq in before:
            if seq not in self._sharing:
                _ledger(seq).leave()
        return tuple(chunks)

    def _book_begin(self, ledger: Ledger, seq: Sequence, schedule: Schedule, built_ns: int) -> None:
        if not ledger.num_steps:
            request = seq.request
            ledger.num_repeated = self._repeats.see(
                request.prompt_token_ids, salt=request.cache_salt
            )
        start_ns = schedule.start_ns
        self._book_wait(ledger, seq, max(start_ns - schedule.turn_ns, ledger.mark_ns))
        ledger.spend(Part.TURN, start_ns)
        if seq.chain is not None and seq.chain.lookup_ns > ledger.lookup_ns:
            spent_ns = seq.chain.lookup_ns - ledger.lookup_ns
            ledger.lookup_ns += spent_ns
            ledger.spend(Part.CACHE_LOOKUP, min(start_ns + spent_ns, built_ns))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.settle()
        child.ledger = _ledger(parent).fork()
        chunk = next(alone.chunk for alone in self._alone if alone.seq is parent)
        self._alone.append(_Alone(child, child.ledger, chunk))

    def masked(self, now_ns: int) -> None:
        self.settle()
        for alone in self._alone:
            alone.ledger.spend(Part.GRAMMAR, now_ns)
        if self._sharing:
            self._common.spend(Part.GRAMMAR, now_ns)
        self._record.masked_ns = now_ns

    def sampled(self, seqs: Seq[Sequence], now_ns: int) -> None:
        if self._plain.sampled(seqs, now_ns):
            return
        if not self._alone:  # all had their last token in the same step
            self._book_sampled(now_ns, len(seqs), seqs[0].last_token_ns)
            return
        self._book_sample(now_ns, len(seqs))
        observe = self.counters.gap_s.observe
        for seq in seqs:
            if seq not in self._sharing:
                _ledger(seq).spend(Part.SAMPLE, now_ns)
            if seq.last_token_ns:
                observe((now_ns - seq.last_token_ns) / 1e9)

    def _book_sampled(self, now_ns: int, num_seqs: int, last_token_ns: int) -> None:
        self._book_sample(now_ns, num_seqs)
        self.counters.gap_s.observe((now_ns - last_token_ns) / 1e9, num_seqs)

    def _book_sample(self, now_ns: int, num_seqs: int) -> None:
        self._record.sampled_ns = now_ns
        self._record.num_sampled = num_seqs
        if self._sharing:
            self._common.spend(Part.SAMPLE, now_ns)

    def verified(self, seqs: Seq[Sequence], begin_ns: int, now_ns: int) -> None:
        for seq in seqs:
            ledger = _ledger(seq)
            ledger.spend(Part.DETOKENISE, begin_ns)
            ledger.spend(Part.SAMPLE, now_ns)
            ledger.rejected_ns -= ledger.draft_row_ns
            ledger.num_seen += 1  # the row that it was chosen from
            confirmed, key = self._record.num_confirmed, (seq.request.id, seq.index)
            confirmed[key] = confirmed.get(key, 0) + 1
            self.counters.gap_s.observe((now_ns - seq.last_token_ns) / 1e9)

    def first_text(self, seq: Sequence, now_ns: int) -> None:
        ledger = seq.ledger
        if ledger is not None and ledger.first_text is None:
            self.settle()
            self._leave(seq, ledger)
            ledger.spend(Part.DETOKENISE, now_ns)
            ledger.first_text, ledger.first_text_ns = tuple(ledger.ns), now_ns

    def close(self, seq: Sequence, now_ns: int) -> None:
        ledger = seq.ledger
        if ledger is None:
            return
        self.settle()
        self._leave(seq, ledger)
        if seq.finish_reason != "error":
            if self._is_in_step and ledger.last_step == self._record.number:
                ledger.spend(Part.DETOKENISE, now_ns)
            else:
                begin_ns, end_ns = self._turn_ns
                if ledger.mark_ns < end_ns:  # it is given up before the turn had a step for it
                    self._book_wait(ledger, seq, max(begin_ns, ledger.mark_ns))
                    ledger.spend(Part.TURN, end_ns)
                self._book_wait(ledger, seq, now_ns)
        ledger.end_ns = now_ns

    def _leave(self, seq: Sequence, ledger: Ledger) -> None:
        """Let a sequence that had a share go on with a ledger of its own."""
        chunk = self._sharing.pop(seq, None)
        if chunk is not None:
            ledger.leave()
            self._all_sharing = None
            if self._is_in_step:
                self._alone.append(_Alone(seq, ledger, chunk))

    def committed(self, now_ns: int) -> None:
        if self._plain.current is None:
            self._book_end(now_ns)
        elif self._plain.end(now_ns):
            self.settle()

    def _book_end(self, now_ns: int) -> None:
        record, common = self._record, self._common
        record.end_ns, short_ns = now_ns, self._short_until(now_ns)
        if self._sharing:
            common.spend(Part.DETOKENISE, now_ns)
        common.mark_ns, common.short_ns, common.last_step = now_ns, short_ns, record.number
        for seq, ledger, chunk in self._alone:
            if not ledger.end_ns:
                was_sampled = ledger.mark_ns >= record.sampled_ns
                ledger.spend(Part.DETOKENISE if was_sampled else Part.PREFILL_OTHERS, now_ns)
                ledger.short_ns = short_ns
                if chunk.is_plain_decode:
                    ledger.join(common)
                    self._sharing[seq] = chunk
        is_all = len(self._sharing) == len(self._scheduled)
        self._all_sharing = self._scheduled if is_all else None
        self._scheduled, self._alone = [], []
        self._is_in_step = False
        self.log.add(record)
        self.counters.count_step(record)

    def _book_wait(self, ledger: Ledger, seq: Sequence, now_ns: int) -> None:
        """Book the time since the last booking, which `seq` spent between steps."""
        begin_ns = ledger.mark_ns
        if seq.num_preemptions > ledger.num_preemptions:
            ledger.num_preemptions = seq.num_preemptions
            ledger.prefix_wait_ns += _new_prefix_wait(ledger, seq, now_ns)
            ledger.spend(Part.QUEUE_BUDGET if seq.has_lost_seat else Part.QUEUE_KV, now_ns)
            ledger.preempted_ns += now_ns - begin_ns
        elif ledger.last_step == self._record.number:
            ledger.spend(Part.ENGINE, now_ns)
        else:
            waited_ns = _new_prefix_wait(ledger, seq, now_ns)
            ledger.prefix_wait_ns += waited_ns
            begin_ns = min(begin_ns + waited_ns, now_ns)
            ledger.spend(Part.QUEUE_PREFIX, begin_ns)
            short_ns = min(max(self._short_until(now_ns) - ledger.short_ns, 0), now_ns - begin_ns)
            ledger.spend(Part.QUEUE_KV, begin_ns + short_ns)
            ledger.spend(Part.QUEUE_BUDGET, now_ns)

    def _short_until(self, now_ns: int) -> int:
        return self._short_ns + (now_ns - self._schedule_ns if self._is_short else 0)

    def _divide(self, total: int, duration: int) -> None:
        """Book the step's work: to each its own tokens' cost, and what the others cost it."""
        own = int(duration * self._cost.share(1, total))
        if self._sharing:
            self._common.ns[Part.DECODE] += own
            self._common.ns[Part.DECODE_OTHERS] += duration - own
        if not self._alone:
            return
        costs = {1: own}

        def cost(num_tokens: int) -> int:
            if num_tokens not in costs:
                costs[num_tokens] = int(duration * self._cost.share(num_tokens, total))
            return costs[num_tokens]

        prefills = [alone.chunk for alone in self._alone if alone.chunk.kind is not Part.DECODE]
        for seq, chunk in self._sharing.items() if prefills else ():
            _blame(_ledger(seq), chunk, prefills, duration - own, total)
        for _, ledger, chunk in self._alone:
            n, num_known = chunk.num_tokens, chunk.num_tokens - chunk.num_drafted
            own = cost(n)
            lost = duration - own
            if chunk.num_drafted:
                verify = own - min(cost(num_known), own)
                ledger.ns[Part.VERIFY] += verify
                ledger.rejected_ns += verify
                ledger.draft_row_ns = verify // chunk.num_drafted
                own -= verify
            again = own * chunk.num_again // num_known
            ledger.ns[Part.RECOMPUTE] += again
            if ledger.num_preemptions:  # else a choice that found no seat beside the first
                ledger.preempted_ns += again
            ledger.ns[chunk.new_kind] += own - again
            is_decode = chunk.kind is Part.DECODE
            ledger.ns[Part.DECODE_OTHERS if is_decode else Part.PREFILL_OTHERS] += lost
            _blame(ledger, chunk, prefills, lost, total)


def _ledger(seq: Sequence) -> Ledger:
    assert seq.ledger is not None
    return seq.ledger


def _blame(ledger: Ledger, chunk: Chunk, prefills: Seq[Chunk], lost: int, total: int) -> None:
    """Lay what a chunk lost in a step of `total` tokens to the charge of others' prompts."""
    num_others = total - chunk.num_tokens
    if lost and num_others:
        for other in prefills:
            if other.request_id != chunk.request_id:
                ledger.accuse(other.request_id, lost * other.num_tokens // num_others)


def _new_prefix_wait(ledger: Ledger, seq: Sequence, now_ns: int) -> int:
    """Return how long `seq` has waited for others' prefixes beyond what is booked."""
    return 0 if seq.chain is None else seq.chain.waited_until(now_ns) - ledger.prefix_wait_ns


def _chunk(seq: Sequence, ledger: Ledger, n: int) -> Chunk:
    begin = seq.num_computed
    num_drafted = 0 if seq.draft is None else len(seq.draft.tokens)
    num_again = min(max(ledger.num_seen - begin, 0), n - num_drafted)
    new_kind = Part.DECODE if begin + num_again >= seq.num_prompt else Part.PREFILL
    is_last = begin + n - num_drafted >= len(seq.token_ids)
    return Chunk(seq.request.id, seq.index, n, num_again, new_kind, is_last, num_drafted)
