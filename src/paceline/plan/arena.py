"""Where values live: last uses, and a few reusable slots instead of a buffer a value."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from paceline.plan.plan import Plan, Value


def root_id(value: Value) -> int:
    """The id of the value whose memory this one lives in: its parent for a view, else its own."""
    return value.id if value.parent is None else value.parent


def last_uses(plan: Plan) -> dict[int, int]:
    """Map each root value to the index of the last op that touches it; outputs outlive the plan."""
    last: dict[int, int] = {}
    for index, op in enumerate(plan.ops):
        for value in (op.out, *op.inputs):
            last[root_id(value)] = index
    for value in plan.outputs.values():
        last[root_id(value)] = len(plan.ops)
    return last


class Arena(Struct, frozen=True):
    """`slot_of` a root value, and the bytes each slot needs."""

    slot_of: dict[int, int]
    slot_bytes: tuple[int, ...]


def assign_slots(plan: Plan, num_bytes: Callable[[Value], int]) -> Arena:
    """Give every root value a slot by a linear scan over last uses; O(ops · slots).

    A value never shares its slot with another that is alive at the same op, so an op may read its
    inputs while it writes. Of the free slots the one that grows least is taken: small values do not
    end up in the slot of the logits.
    """
    last = last_uses(plan)
    slot_of: dict[int, int] = {}
    sizes: list[int] = []
    free: list[int] = []
    live: list[int] = []
    for index, op in enumerate(plan.ops):
        out = op.out
        if out.parent is None and out.id not in slot_of:
            need = num_bytes(out)
            if free:
                slot = min(free, key=lambda s: (max(need - sizes[s], 0), max(sizes[s] - need, 0)))
                free.remove(slot)
                sizes[slot] = max(sizes[slot], need)
            else:
                slot = len(sizes)
                sizes.append(need)
            slot_of[out.id] = slot
            live.append(out.id)
        ended = [v for v in live if last[v] <= index]
        free += [slot_of[v] for v in ended]
        live = [v for v in live if last[v] > index]
    return Arena(slot_of, tuple(sizes))
