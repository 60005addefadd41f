"""Ledger: the wall time of a request, partitioned. `docs/ledger.md` defines every part."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace


class Part(enum.IntEnum):
    """What an instant of a request's wall time was spent on. Each instant belongs to one part.

    A new phase of the engine is a new member here, and a `spend` where the phase ends; sums,
    metrics and reports follow from the members.
    """

    RECEIVE = 0
    LOAD = enum.auto()
    PARSE = enum.auto()
    TEMPLATE = enum.auto()
    TOKENISE = enum.auto()
    QUEUE_BUDGET = enum.auto()
    QUEUE_KV = enum.auto()
    QUEUE_PREFIX = enum.auto()
    TURN = enum.auto()
    CACHE_LOOKUP = enum.auto()
    ENGINE = enum.auto()
    PREFILL = enum.auto()
    PREFILL_OTHERS = enum.auto()
    RECOMPUTE = enum.auto()
    DECODE = enum.auto()
    DECODE_OTHERS = enum.auto()
    DRAFT = enum.auto()
    VERIFY = enum.auto()
    GIL_WAIT = enum.auto()
    GRAMMAR = enum.auto()
    SAMPLE = enum.auto()
    DETOKENISE = enum.auto()
    HANDOFF = enum.auto()
    SEND = enum.auto()

    @property
    def label(self) -> str:
        return self.name.lower()


NUM_PARTS = len(Part)
RESIDUAL = "residual"
UNBOOKED = "unbooked"  # of a call that still runs: since the last booking
MAX_BLAMED = 64  # requests that a ledger blames by name; the rest share the key ""


class Ledger(Struct, eq=False, kw_only=True):
    """Where the time of one sequence in the engine went, from `begin_ns` to `mark_ns`.

    `ns` is indexed by Part. `sum(ns) == mark_ns - begin_ns`, but for steps that failed.
    """

    begin_ns: int
    mark_ns: int  # all before it is accounted for
    short_ns: int  # how long the queue had lacked KV memory in all, when `mark_ns` was set
    ns: list[int] = field(default_factory=lambda: [0] * NUM_PARTS)
    blame: dict[str, int] = field(default_factory=dict)  # request -> ns lost to its prefill
    preempted_ns: int = 0  # waiting after a preemption, and computing again what was lost
    rejected_ns: int = 0  # of VERIFY: the rows of guesses that were wrong
    draft_row_ns: int = 0  # what a row of the latest draft cost
    num_seen: int = 0  # tokens that were in the KV cache at some time
    num_repeated: int = 0  # tokens with which an earlier prompt began, too
    num_preemptions: int = 0
    prefix_wait_ns: int = 0  # of the waits for a common prefix, what is booked
    lookup_ns: int = 0  # of the look-ups in the prefix cache, what is booked
    num_steps: int = 0
    num_common_steps: int = 0  # of those: the prompt's, which another choice computed for all
    last_step: int | None = None
    first_text: tuple[int, ...] | None = None  # `ns` when the first visible text was made
    first_text_ns: int = 0
    end_ns: int = 0
    share: Share | None = None  # while it has one, what is booked here is out of date

    def spend(self, part: Part, until_ns: int) -> None:
        """Book the time from `mark_ns` on as `part`."""
        self.ns[part] += until_ns - self.mark_ns
        self.mark_ns = until_ns

    def accuse(self, request_id: str, ns: int) -> None:
        """Book `ns`, which is in a part already, as lost to the prefill of a request."""
        if request_id not in self.blame and len(self.blame) >= MAX_BLAMED:
            request_id = ""
        self.blame[request_id] = self.blame.get(request_id, 0) + ns

    def fork(self) -> Ledger:
        """Return the ledger of a choice that has shared all of this one's time so far."""
        return Ledger(
            begin_ns=self.begin_ns,
            mark_ns=self.mark_ns,
            short_ns=self.short_ns,
            ns=list(self.ns),
            blame=dict(self.blame),
            preempted_ns=self.preempted_ns,
            rejected_ns=self.rejected_ns,
            num_seen=self.num_seen,
            num_repeated=self.num_repeated,
            num_steps=self.num_steps,
            num_common_steps=self.num_steps,
            last_step=self.last_step,
        )

    def join(self, common: Ledger) -> None:
        """Have a share in all that `common` books from now on.

        Precondition: both are booked up to the end of the same step.
        """
        ns = [own - other for own, other in zip(self.ns, common.ns, strict=True)]
        self.share = Share(common, ns, self.num_steps - common.num_steps)

    def leave(self) -> None:
        """Take over what the common ledger has booked since `join`, and go on alone."""
        share = self.share
        if share is None:
            return
        common, num_steps = share.common, share.num_steps()
        self.num_seen += num_steps - self.num_steps  # each step decoded a token
        self.num_steps, self.last_step = num_steps, common.last_step
        self.ns, self.mark_ns, self.short_ns = share.ns(), common.mark_ns, common.short_ns
        self.share = None  # last: until then a reader goes by the share, which is as true

    def so_far(self, now_ns: int) -> Ledger:
        """Return a copy of what is booked by now, for a thread that may not wait for the step."""
        while True:
            share = self.share
            ns = list(self.ns) if share is None else share.ns()
            num_steps = self.num_steps if share is None else share.num_steps()
            last_step = self.last_step if share is None else share.common.last_step
            if self.share is share:
                break
        return replace(
            self, ns=ns, blame=dict(self.blame), end_ns=self.end_ns or now_ns,
            num_steps=num_steps, last_step=last_step, share=None,
        )  # fmt: skip


class Share(Struct, frozen=True, eq=False):
    """What a ledger has beside a common one: the differences to it, which stay as they are."""

    common: Ledger
    ns_apart: list[int]  # by Part
    num_steps_apart: int

    def ns(self) -> list[int]:
        return [apart + ns for apart, ns in zip(self.ns_apart, self.common.ns.copy(), strict=True)]

    def num_steps(self) -> int:
        return self.num_steps_apart + self.common.num_steps


def parts_ms(ns: Sequence[int], wall_ns: int, rest: str = RESIDUAL) -> dict[str, float]:
    """Return {part: milliseconds} of the parts that are not zero, and what is left as `rest`.

    The values sum to `wall_ns`: the residual is what no part claims.
    """
    parts = {part.label: ns[part] / 1e6 for part in Part if ns[part]}
    parts[rest] = (wall_ns - sum(ns)) / 1e6
    return parts


def top_blame(blame: Mapping[str, int], limit: int) -> list[tuple[str, int]]:
    """Return the (request, ns) that cost most, at most `limit`; the rest as ("", ns)."""
    named = sorted(((k, v) for k, v in blame.items() if k), key=lambda item: -item[1])
    rest = sum(ns for _, ns in named[limit:]) + blame.get("", 0)
    return [*named[:limit], ("", rest)] if rest else named[:limit]
