"""Scheduler: which sequences run in a step, how many tokens each, and in which blocks."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from msgspec import Struct, field

from paceline.engine.block_pool import BlockPool
from paceline.engine.prefix_cache import Match, PrefixCache
from paceline.engine.sequence import Sequence, State
from paceline.policies.base import Budget, Policy

if TYPE_CHECKING:
    from paceline.engine.kv_tier import U8

MAX_SCORED = 128  # logit rows of a step that score prompts: they take memory and time
_NOTHING = Match([], 0)


class Schedule(Struct):
    """One step: `chunks` of (sequence, tokens to compute), and what is done before it.

    First blocks are copied, in order, then `writes` of (blocks, their content) are made.
    """

    start_ns: int
    is_short_of_kv: bool = False  # the first that waits was not admitted for want of blocks
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    copy_src: list[int] = field(default_factory=list)
    copy_dst: list[int] = field(default_factory=list)
    writes: list[tuple[list[int], U8]] = field(default_factory=list)
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_drafted: int = 0  # of the tokens: guesses (`speculation`)
    draft_ns: int = 0  # how long it took to make them
    turn_ns: int = 0  # how long other engines' steps had kept it from beginning


class Scheduler:
    """Gives out tokens, seats and blocks in the policy's order.

    - A sequence holds blocks for all its known tokens from admission on, so a prompt that has
      begun can always be finished; only decoding takes more.
    - When blocks run out the last running sequence in the order is preempted: it gives back all
      its blocks, keeps its tokens and computes them again later. The first in the order is never
      preempted, so every schedule makes progress.
    - Sequences that need one token get it first; what is left of the budget goes to those that
      catch up.
    - A sequence whose prompt is scored computes all of it, in chunks of MAX_SCORED tokens.
    - With a prefix cache a sequence begins after what is known of its tokens, and may wait for a
      sequence ahead that computes the same prefix; it does not hold up those behind it then.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        cache: PrefixCache | None = None,
    ) -> None:
        self.policy = policy
        self.pool = pool
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.only: Container[str] | None = None  # ids of the requests that move on; None: all
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def observe(self, num_tokens: int, forward_s: float) -> None:
        """Let those who plan by the cost of a step learn what one cost."""
        self.policy.observe(num_tokens, forward_s)
        if self.cache is not None:
            self.cache.observe(num_tokens, forward_s)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has the parent's prompt, share the blocks of it.

        Precondition: exactly the prompt of `parent` is computed. Without a free seat the child
        waits and computes the prompt itself.
        """
        child.scheduled_ns = parent.scheduled_ns  # the prompt's steps were the child's, too
        child.num_cached = parent.num_cached
        if len(self.running) >= self._max_num_seqs:
            self.waiting.append(child)
            return
        self.pool.share(parent.block_table)
        child.block_table.extend(parent.block_table)
        child.num_computed = parent.num_computed
        if self.cache is not None:
            self.cache.forked(parent, child)
        child.state = State.RUNNING
        self.running.append(child)

    def remove(self, seq: Sequence) -> None:
        """Forget `seq` and free its blocks. Idempotent."""
        if seq.state is State.FINISHED:
            return
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self._release_blocks(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.state = State.FINISHED

    def schedule(self, now_ns: int) -> Schedule:
        """Return the next step; it is empty only if there is no work for those that move on."""
        schedule = Schedule(now_ns)
        if self.cache is not None:
            self.cache.begin_step(self.running)
        order = self.policy.order(self.waiting, self.running, now_ns)
        if self.only is not None:
            order = [seq for seq in order if seq.request.id in self.only]
        self._place(order, schedule)
        self._give_tokens(order, schedule)
        for seq, _ in schedule.chunks:
            if not seq.scheduled_ns:
                seq.scheduled_ns = now_ns
        return schedule

    def _place(self, order: list[Sequence], schedule: Schedule) -> None:
        """Decide who runs: grow the running, admit the waiting, preempt the last in the order."""
        num_preemptions = self.num_preemptions
        num_wanted = 0  # tokens that those placed so far could compute
        is_closed = False
        for position, seq in enumerate(order):
            if seq.state is State.RUNNING:
                if not self._grow(seq, order, position, schedule):
                    continue
            elif is_closed or num_wanted >= self._max_tokens:
                continue
            else:
                match = _NOTHING
                if self.cache is not None and seq.is_scored:  # or the prompt's logits are wanted
                    match = self.cache.match(seq, schedule.start_ns)
                if match.is_coming:
                    continue
                if not self._admit(seq, match, order, position, schedule):
                    is_closed = True  # nobody overtakes it, or it might wait for ever
                    continue
            if self.cache is not None:
                self.cache.placed(seq)
            # Blocks just taken back are not handed out again before the next step.
            is_closed = is_closed or self.num_preemptions > num_preemptions
            num_wanted += len(seq.token_ids) - seq.num_computed

    def _grow(
        self, seq: Sequence, order: list[Sequence], position: int, schedule: Schedule
    ) -> bool:
        """Give a running sequence a block for every known token, or preempt it.

        The block that it writes into next must be its own: a shared one is copied.
        """
        table, pool = seq.block_table, self.pool
        write_idx = seq.num_computed // self._block_size
        is_shared = write_idx < len(table) and pool.is_shared(table[write_idx])
        num_missing = self._num_blocks(seq) - len(table)
        if not (is_shared or num_missing):
            return True
        while pool.num_available < num_missing + is_shared:
            victim = self._last_running(order, position)
            if victim is seq and self._make_pins_give_way(num_missing + is_shared, alone=1):
                continue
            self._preempt(victim)
            if victim is seq:
                return False
            is_shared = write_idx < len(table) and pool.is_shared(table[write_idx])
        if is_shared:
            [copy] = pool.allocate(1)
            schedule.copy_src.append(table[write_idx])
            schedule.copy_dst.append(copy)
            pool.release([table[write_idx]])
            table[write_idx] = copy
            seq.table_epoch += 1
        table.extend(pool.allocate(num_missing))
        return True

    def _admit(
        self,
        seq: Sequence,
        match: Match,
        order: list[Sequence],
        position: int,
        schedule: Schedule,
    ) -> bool:
        """Seat a waiting sequence if seats and blocks allow, at the cost of those behind it."""
        pool = self.pool
        pool.share(match.blocks)  # first, so that nobody's leaving counts as making them available
        num_blocks = self._num_blocks(seq) - len(match.blocks)
        behind = [other for other in order[position + 1 :] if other.state is State.RUNNING]
        num_blocks_behind = sum(pool.num_exclusive(other.block_table) for other in behind)
        if not self.running:
            self._make_pins_give_way(num_blocks, alone=0)
        is_short = pool.num_available + num_blocks_behind < num_blocks
        if is_short or len(self.running) - len(behind) >= self._max_num_seqs:
            pool.release(match.blocks)
            schedule.is_short_of_kv = schedule.is_short_of_kv or is_short
            return False
        while len(self.running) >= self._max_num_seqs or pool.num_available < num_blocks:
            self._preempt(behind.pop(), is_for_seat=pool.num_available >= num_blocks)
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.state = State.RUNNING
        seq.block_table.extend(match.blocks)
        seq.block_table.extend(pool.allocate(num_blocks))
        begin = len(match.blocks)
        if match.num_stored and self.cache is not None:
            match, data = self.cache.restore(seq, match)
            if len(data):  # what the store had may have gone bad
                schedule.writes.append((seq.block_table[begin : begin + len(data)], data))
                begin += len(data)
        if match.source is not None:
            # Copies run in order and before anything is written: even a source that has just been
            # given up for new blocks is still what it was.
            schedule.copy_src.append(match.source)
            schedule.copy_dst.append(seq.block_table[begin])
        seq.num_computed = match.num_tokens
        if self.cache is not None:
            self.cache.admitted(seq, match)
        return True

    def _make_pins_give_way(self, num_blocks: int, *, alone: int) -> bool:
        """Let pins go for whom nobody else's leaving would help; return whether that was enough."""
        if self.cache is None or len(self.running) > alone:
            return False
        self.cache.pins.give_way(num_blocks)
        return self.pool.num_available >= num_blocks

    def _give_tokens(self, order: list[Sequence], schedule: Schedule) -> None:
        budget = Budget(self._max_tokens)
        num_scored_left = MAX_SCORED
        behind: list[Sequence] = []
        for seq in order:
            if seq.state is not State.RUNNING:
                continue
            if len(seq.token_ids) - seq.num_computed > 1:
                behind.append(seq)
            elif budget.num_left:
                schedule.chunks.append((seq, 1))
                budget.num_left -= 1
                budget.num_decodes += 1
        for seq in behind:
            if not budget.num_left:
                break
            num_tokens = min(self.policy.quota(seq, budget), len(seq.token_ids) - seq.num_computed)
            if num_tokens <= 0 and not schedule.chunks:
                num_tokens = 1  # no policy can stop the engine
            if seq.scores is not None:
                if len(seq.unscored(num_tokens)) > num_scored_left:
                    num_known = max(0, len(seq.scores) - 1 - seq.num_computed)
                    num_tokens = num_known + num_scored_left
                num_scored_left -= len(seq.unscored(num_tokens))
            if num_tokens > 0:
                schedule.chunks.append((seq, num_tokens))
                budget.num_left -= num_tokens
                budget.num_prefill += num_tokens
        schedule.num_tokens = budget.num_decodes + budget.num_prefill
        schedule.num_prefill_tokens = budget.num_prefill

    def _num_blocks(self, seq: Sequence) -> int:
        return -(-len(seq.token_ids) // self._block_size)

    def _last_running(self, order: list[Sequence], position: int) -> Sequence:
        for seq in reversed(order[position:]):
            if seq.state is State.RUNNING:
                return seq
        raise AssertionError("the sequence at `position` runs")

    def _preempt(self, seq: Sequence, *, is_for_seat: bool = False) -> None:
        self.running.remove(seq)
        self._release_blocks(seq)
        seq.state = State.WAITING
        seq.num_preemptions += 1
        seq.has_lost_seat = is_for_seat
        self.num_preemptions += 1
        self.waiting.append(seq)

    def _release_blocks(self, seq: Sequence) -> None:
        if self.cache is not None:
            self.cache.leaving(seq)
        self.pool.release(seq.block_table)
        seq.block_table.clear()
        seq.table_epoch += 1
        seq.num_computed = 0
