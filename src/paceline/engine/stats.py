"""What the engine tells about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from paceline.engine.scheduler import Schedule
    from paceline.engine.speculation.stats import SpecStats


class EngineStats(Struct, frozen=True, kw_only=True):
    """State of the engine between two steps; from `num_preemptions` on all only ever grow."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_live_blocks: int
    num_cached_blocks: int
    num_blocks: int
    num_preemptions: int
    num_steps: int
    num_generated_tokens: int
    num_prefix_queried: int = 0  # prompt tokens looked up in the prefix cache
    num_prefix_hit: int = 0  # and found there
    num_blocks_stored: int = 0  # handed to the KV tier
    num_blocks_restored: int = 0  # and read from it
    num_forced_tokens: int = 0  # chosen without a step of their own: a structure left no choice
    speculation: SpecStats | None = None  # None: off

    @property
    def kv_use(self) -> float:
        """The share of the blocks that is in use, 0 to 1."""
        return self.num_live_blocks / self.num_blocks if self.num_blocks else 0.0

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return these with the totals of an engine before this one added to theirs."""
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in _TOTALS}
        speculation = self.speculation or earlier.speculation
        if self.speculation is not None and earlier.speculation is not None:
            speculation = self.speculation.after(earlier.speculation)
        return replace(self, **sums, speculation=speculation)


_FIELDS = EngineStats.__struct_fields__
_TOTALS = tuple(
    name for name in _FIELDS[_FIELDS.index("num_preemptions") :] if name != "speculation"
)
NO_ENGINE = EngineStats(
    num_running=0, num_waiting=0, num_free_blocks=0, num_live_blocks=0, num_cached_blocks=0,
    num_blocks=0, num_preemptions=0, num_steps=0, num_generated_tokens=0,
)  # fmt: skip


class StepStats(Struct, frozen=True, kw_only=True):
    """What one step did, and where its time went."""

    num_tokens: int = 0
    num_seqs: int = 0
    num_prefill_tokens: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0

    @classmethod
    def of(
        cls, schedule: Schedule, scheduled_ns: int, built_ns: int, forward_ns: int,
        sampled_ns: int, end_ns: int,
    ) -> StepStats:  # fmt: skip
        """Return those of a step, given when each of its parts ended."""
        return cls(
            num_tokens=schedule.num_tokens,
            num_seqs=len(schedule.chunks),
            num_prefill_tokens=schedule.num_prefill_tokens,
            schedule_s=(scheduled_ns - schedule.start_ns) / 1e9,
            build_s=(built_ns - scheduled_ns) / 1e9,
            forward_s=(forward_ns - built_ns) / 1e9,
            sample_s=(sampled_ns - forward_ns) / 1e9,
            commit_s=(end_ns - sampled_ns) / 1e9,
        )
