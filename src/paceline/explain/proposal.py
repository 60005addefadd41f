"""Proposals: what a lever has to offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.explain.causes import Finding

if TYPE_CHECKING:
    from paceline.explain.situation import Situation

Change = Mapping[str, str]  # option of `paceline serve` -> value; "": it takes none
Predict = Callable[[Finding], float]  # milliseconds after the change
Effect = Callable[["Situation"], Predict]  # of the same change, on any run


class Proposal(Struct, frozen=True, kw_only=True):
    """A change, what is expected of it, and what it costs elsewhere."""

    change: Change  # empty: nothing that `paceline serve` can do by itself
    text: str
    effect: Effect
    price: str = ""
    is_trade: bool = False  # it takes from some calls what bounds others: told even at a net loss
    is_lossy: bool = False  # answers change: told after what leaves them as they are
