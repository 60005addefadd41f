"""The steps of an engine: the latest ones in full, and running totals of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import takewhile
from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, field

from paceline.measure.histogram import COUNTS, SECONDS, Histogram
from paceline.measure.ledger import NUM_PARTS, Part

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence
    from paceline.measure.work import StepWork

MAX_STEPS = 8192
MAX_CHUNKS = 65_536  # over all steps that are kept: about 10 MB
PHASES = ("schedule", "draft", "build", "forward", "gil_wait", "grammar", "sample", "commit")


class Chunk(NamedTuple):
    """The tokens of one sequence in one step; the first `num_again` had been computed before.

    `is_last`: none of the sequence's known tokens is left after it, so it gives a new one.
    The last `num_drafted` of its tokens are guesses.
    """

    request_id: str
    choice: int
    num_tokens: int
    num_again: int
    new_kind: Part  # of the other tokens: PREFILL or DECODE
    is_last: bool
    num_drafted: int = 0

    @property
    def kind(self) -> Part:
        """RECOMPUTE where anything is computed again, else PREFILL or DECODE."""
        return Part.RECOMPUTE if self.num_again else self.new_kind

    @property
    def is_plain_decode(self) -> bool:
        """One new token is computed, for the one after it, and nothing else."""
        is_decode = self.kind is Part.DECODE
        return is_decode and self.is_last and self.num_tokens == 1 and not self.num_drafted


class StepRecord(Struct, kw_only=True, gc=False):
    """One step: when its phases ended, on the engine's clock, and what was in it."""

    number: int = -1
    start_ns: int = 0
    scheduled_ns: int = 0
    built_ns: int = 0
    work_ns: int = 0  # the backend was done
    forward_ns: int = 0  # the engine's thread had the GIL again
    masked_ns: int = 0  # the masks of structured answers were there; 0: there were none
    sampled_ns: int = 0
    end_ns: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_keys: int = 0  # attended, over all layers
    kv_bytes: int = 0  # read
    draft_ns: int = 0  # up to `scheduled_ns`
    chunks: tuple[Chunk, ...] = ()
    # (request, choice) -> tokens that it gave beyond its first, because drafts were right
    num_confirmed: dict[tuple[str, int], int] = field(default_factory=dict)

    def tokens_by_kind(self) -> dict[Part, int]:
        """Return how many tokens the step computed, by PREFILL, RECOMPUTE, DECODE and VERIFY."""
        tokens = {Part.PREFILL: 0, Part.RECOMPUTE: 0, Part.DECODE: 0}
        for _, _, num_tokens, num_again, new_kind, _, num_drafted in self.chunks:
            tokens[Part.RECOMPUTE] += num_again
            tokens[new_kind] += num_tokens - num_again - num_drafted
            if num_drafted:
                tokens[Part.VERIFY] = tokens.get(Part.VERIFY, 0) + num_drafted
        return tokens

    @property
    def stamps(self) -> tuple[int, ...]:
        """The begin of the step's first phase and the end of each, in the order of PHASES."""
        scheduled_ns, forward_ns = self.scheduled_ns, self.forward_ns
        return (
            self.start_ns, scheduled_ns - self.draft_ns, scheduled_ns, self.built_ns, self.work_ns,
            forward_ns, self.masked_ns or forward_ns, self.sampled_ns, self.end_ns,
        )  # fmt: skip

    @property
    def phases(self) -> tuple[tuple[str, int, int], ...]:
        """(phase, begin, end) in order; they fill the step. `draft` only where it took time."""
        stamps = self.stamps
        return tuple(
            (name, begin_ns, end_ns)
            for name, begin_ns, end_ns in zip(PHASES, stamps, stamps[1:], strict=False)
            if name != "draft" or self.draft_ns
        )


class StepLog:
    """The latest steps, bounded in number and in chunks. Written by one thread, read by any."""

    def __init__(self, max_steps: int = MAX_STEPS, max_chunks: int = MAX_CHUNKS) -> None:
        self._steps: deque[StepRecord] = deque()
        self._max_steps = max_steps
        self._max_chunks = max_chunks
        self._num_chunks = 0

    def add(self, record: StepRecord) -> None:
        self._steps.append(record)
        self._num_chunks += len(record.chunks)
        while len(self._steps) > self._max_steps or self._num_chunks > self._max_chunks:
            self._num_chunks -= len(self._steps.popleft().chunks)

    def since(self, start_ns: int) -> list[StepRecord]:
        """Return the kept steps that ended after `start_ns`, oldest first."""
        ended_after = takewhile(
            lambda record: record.end_ns > start_ns, reversed(self._steps.copy())
        )
        return list(ended_after)[::-1]


class StepCounters:
    """Totals over all steps since the start. Written by the engine's thread, read by any."""

    def __init__(self, work: StepWork | None) -> None:
        self.work = work
        self.duration_s = Histogram(SECONDS)
        self.gap_s = Histogram(SECONDS)  # between two tokens of a sequence
        self.num_tokens = Histogram(COUNTS)
        self._stamps = StepRecord().stamps  # summed over the steps
        self.tokens = [0] * NUM_PARTS  # by Part: PREFILL, RECOMPUTE, DECODE and VERIFY
        self.num_sampled = 0
        self.num_keys = 0
        self.kv_bytes = 0
        # Of the latest step; those that follow are often the same.
        self._chunks: tuple[Chunk, ...] = ()
        self._tokens: dict[Part, int] = {}

    @property
    def num_steps(self) -> int:
        return self.duration_s.count

    @property
    def phase_ns(self) -> dict[str, int]:
        """How long each phase took in all; `draft` only where drafts were made."""
        stamps = self._stamps
        spent = dict(zip(PHASES, map(sub, stamps[1:], stamps), strict=False))
        if not spent["draft"]:
            del spent["draft"]
        return spent

    @property
    def macs(self) -> int:
        """Multiply-adds of all steps; 0 where the model's shape is not known."""
        if self.work is None:
            return 0
        return self.work.macs(
            num_tokens=sum(self.tokens),
            num_logit_rows=self.num_sampled + self.tokens[Part.VERIFY],
            num_keys=self.num_keys,
        )

    @property
    def weight_bytes(self) -> int:
        return 0 if self.work is None else self.work.weight_bytes * self.num_steps

    def count_work(self, scheduled: Seq[tuple[Sequence, int]]) -> tuple[int, int]:
        """Count a step's keys and KV bytes, and return them.

        Precondition: `num_computed` does not count the step yet.
        """
        num_keys, kv_bytes = self.count_decodes([s.num_computed for s, n in scheduled if n == 1])
        if self.work is None:
            return num_keys, kv_bytes
        for seq, n in scheduled:
            if n != 1:
                more_keys = self.work.num_keys(seq.num_computed, n)
                more_bytes = self.work.kv_bytes(seq.num_computed, n)
                num_keys, kv_bytes = num_keys + more_keys, kv_bytes + more_bytes
                self.num_keys += more_keys
                self.kv_bytes += more_bytes
        return num_keys, kv_bytes

    def count_decodes(self, contexts: Seq[int]) -> tuple[int, int]:
        """Do that for one token each of sequences that have so many tokens computed."""
        if self.work is None:
            return 0, 0
        num_keys, kv_bytes = self.work.decodes(contexts)
        self.num_keys += num_keys
        self.kv_bytes += kv_bytes
        return num_keys, kv_bytes

    def count_step(self, record: StepRecord) -> None:
        self.duration_s.observe((record.end_ns - record.start_ns) / 1e9)
        self.num_tokens.observe(record.num_tokens)
        self.num_sampled += record.num_sampled
        self._stamps = tuple(map(add, self._stamps, record.stamps))
        if record.chunks is not self._chunks:
            self._chunks, self._tokens = record.chunks, record.tokens_by_kind()
        for kind, count in self._tokens.items():
            self.tokens[kind] += count
