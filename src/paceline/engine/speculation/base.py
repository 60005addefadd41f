"""What drafting is: a Proposer guesses, a Draft holds the guesses, a Pace says how many pay."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

if TYPE_CHECKING:
    from paceline.engine.sequence import Sequence

MAX_NODES = 63  # of a draft: with the last known token they are the 64 rows that a tree mask holds
MAX_DRAFTED = 64  # nodes of a step, over all sequences
RoundCost = Callable[[int], float]  # seconds of a guess for each of so many sequences
ROOT = -1  # the last known token, which every draft continues


class Draft(Struct, eq=False):
    """Guessed tokens after a sequence's last known one, as a tree.

    Node i holds `tokens[i]` and follows node `parents[i] < i`, or ROOT. Without parents it is a
    chain. A draft that `is_forced` is no guess: nothing else is allowed to come. `path` are the
    nodes that turned out right, in order:

        tokens 5 6 7, parents ROOT 0 0: after 5 comes 6 or 7; the path of "5 7" is nodes 0 and 2
    """

    tokens: Seq[int]
    parents: Seq[int] | None = None
    path: list[int] = field(default_factory=list)
    is_forced: bool = False

    @property
    def is_chain(self) -> bool:
        return self.parents is None

    @property
    def end(self) -> int:
        """The last node that turned out right."""
        return self.path[-1] if self.path else ROOT

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    def has_children(self, node: int) -> bool:
        return any(self.parent(i) == node for i in range(node + 1, len(self.tokens)))

    def accept(self, token_id: int) -> bool:
        """Take the token that came next; return whether the draft foresaw it."""
        end = self.end
        for node in range(end + 1, len(self.tokens)):
            if self.tokens[node] == token_id and self.parent(node) == end:
                self.path.append(node)
                return True
        return False

    def depths(self) -> list[int]:
        """Return each node's distance from the root."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def masks(self) -> list[int]:
        """Return which rows each row sees: bit 0 is the root's, bit i + 1 that of node i."""
        masks = [1]
        for node in range(len(self.tokens)):
            masks.append(masks[self.parent(node) + 1] | 1 << (node + 1))
        return masks


class Forecast(Struct, frozen=True):
    """What a proposer could draft for a sequence now.

    `kinds` has an entry a token, its class in the acceptance statistics: tokens of one kind are
    right about equally often. `tokens` are the guesses where they cost nothing to know: they are
    compared with what comes even when they are not drafted. `instead` is what could be drafted in
    another way.
    """

    kinds: Seq[int]
    tokens: Seq[int] = ()
    setup_s: float = 0.0  # before the first guess, once: reading a text that was not read yet
    instead: Forecast | None = None

    @property
    def is_free(self) -> bool:
        return bool(self.tokens)


class Proposer(Protocol):
    """A way to guess the tokens that come next. A wrong guess costs time and changes nothing."""

    @property
    def num_kinds(self) -> int: ...

    def prior(self, kind: int) -> float:
        """Return how often tokens of this kind are right, before anything was measured."""

    def forecast(self, seq: Sequence, limit: int, budget_s: float) -> Forecast:
        """Return what could be drafted for `seq`, at most `limit >= 1` tokens.

        A set-up of more than `budget_s` is not paid for: less of it may do, or there is none.
        """

    def propose(self, wanted: Seq[tuple[Sequence, Forecast, int]]) -> list[Draft]:
        """Return a draft of at most n nodes for each (sequence, forecast, n); it may be empty."""

    def round_s(self, num_seqs: int) -> float:
        """Return what guesses that are not free cost: one for each of `num_seqs` sequences."""

    def release(self, seq: Sequence) -> None:
        """`seq` has ended. Idempotent."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""


class Offer(Struct, frozen=True):
    """A forecast as a Pace sees it: chances that a token is right if those before it are."""

    chances: Seq[float]
    is_free: bool = True
    setup_s: float = 0.0
    num_left: int = 0  # tokens that the sequence may still get


class Pace(Protocol):
    """Says how long the drafts of a step are."""

    @property
    def budget_s(self) -> float:
        """The longest set-up that is paid for now."""

    def is_open(self, num_rows: int, num_prefill: int) -> bool:
        """Return whether any draft could pay in such a step; if not, no forecast is asked for."""

    def better(self, offers: Seq[Offer], num_rows: int, round_s: RoundCost) -> int:
        """Return which of the offers for one sequence promises most."""

    def lengths(
        self, offers: Seq[Offer], num_rows: int, num_prefill: int, round_s: RoundCost
    ) -> list[int]:
        """Return a draft length for each sequence.

        The step has `num_rows` rows without drafts, `num_prefill` of them of prompts.
        """

    def observe(self, *, num_rows: int, num_drafted: int, num_accepted: int, num_prefill: int,
                seconds: float, draft_s: float, setup_s: float,
                look_s: float) -> None:  # fmt: skip
        """A step of `num_rows` rows took `seconds`; before that, `draft_s` went into making drafts,
        `setup_s` of it into set-ups as forecast, and `look_s` into finding out which were worth it.
        They are `num_drafted` of the rows.
        """
