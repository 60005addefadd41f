"""What speculation has done so far."""

from __future__ import annotations

from operator import add

from msgspec import Struct

MAX_POSITIONS = 16


class SpecStats(Struct, kw_only=True):
    """Totals since the start. Written by the engine's thread, read by any.

    Position 0 is the first token of a draft; those from the last one on are counted together.
    """

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_expected: float = 0.0  # what the chances promised of `num_accepted`
    drafted_at: list[int]
    accepted_at: list[int]
    draft_s: float = 0.0  # spent on guesses that are not free
    steps: dict[str, int]  # without prompts, by "rows without drafts+drafted"

    @classmethod
    def empty(cls) -> SpecStats:
        return cls(drafted_at=[0] * MAX_POSITIONS, accepted_at=[0] * MAX_POSITIONS, steps={})

    def copy(self) -> SpecStats:
        """Return the totals as they are now."""
        return SpecStats(
            num_drafts=self.num_drafts,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_expected=self.num_expected,
            drafted_at=list(self.drafted_at),
            accepted_at=list(self.accepted_at),
            draft_s=self.draft_s,
            steps=dict(self.steps),
        )

    def after(self, earlier: SpecStats) -> SpecStats:
        """Return these totals with those of an engine before this one."""
        sizes = self.steps.keys() | earlier.steps.keys()
        return SpecStats(
            num_drafts=self.num_drafts + earlier.num_drafts,
            num_drafted=self.num_drafted + earlier.num_drafted,
            num_accepted=self.num_accepted + earlier.num_accepted,
            num_expected=self.num_expected + earlier.num_expected,
            drafted_at=list(map(add, self.drafted_at, earlier.drafted_at)),
            accepted_at=list(map(add, self.accepted_at, earlier.accepted_at)),
            draft_s=self.draft_s + earlier.draft_s,
            steps={size: self.steps.get(size, 0) + earlier.steps.get(size, 0) for size in sizes},
        )

    def count_step(self, num_plain: int, num_drafted: int, draft_s: float) -> None:
        """Count a step that holds no prompt."""
        size = f"{num_plain}+{num_drafted}"
        self.steps[size] = self.steps.get(size, 0) + 1
        self.draft_s += draft_s

    def count(self, depths: list[int], num_accepted: int) -> None:
        """Count a draft of nodes at these depths, of which a path of `num_accepted` was right."""
        self.num_drafts += 1
        self.num_drafted += len(depths)
        self.num_accepted += num_accepted
        for depth in set(depths):
            self.drafted_at[min(depth, MAX_POSITIONS) - 1] += 1
        for position in range(num_accepted):
            self.accepted_at[min(position, MAX_POSITIONS - 1)] += 1
