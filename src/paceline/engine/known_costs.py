"""Known costs: what steps of a model took when `paceline roofline` measured them.

Who plans by the cost of a step begins with them and learns on from the steps that run. Which
tokens come never depends on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.config import EngineConfig, parse_spec

if TYPE_CHECKING:
    from paceline.measure.step_table import StepTable

Points = tuple[tuple[int, float], ...]  # tokens of a step, ascending -> seconds of its forward


class KnownCosts(Struct, frozen=True):
    """Steps of one sequence, with logits for its last token and for all."""

    prefill: Points = ()
    verify: Points = ()


def known_costs(path: Path, config: EngineConfig) -> KnownCosts:
    """Return what was measured of a model on this machine with these options.

    Nothing is looked up where nobody plans by it. Precondition: `config.num_threads` is known.
    """
    if config.speculate == "off" and parse_spec(config.policy)[0] != "slo":
        return KnownCosts()
    from paceline.measure.step_table import read_step_table

    assert config.num_threads is not None
    table = read_step_table(
        path, num_threads=config.num_threads, kv_dtype=config.kv_dtype,
        block_size=config.block_size,
    )  # fmt: skip
    return KnownCosts() if table is None else known_points(table)


def known_points(table: StepTable) -> KnownCosts:
    """Return what a table says of sequences that have just begun."""
    points = {curve.kind: curve.points for curve in table.curves if not curve.context}
    return KnownCosts(points.get("prefill", ()), points.get("verify", ()))
