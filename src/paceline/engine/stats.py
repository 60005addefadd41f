"""What the engine tells about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
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
