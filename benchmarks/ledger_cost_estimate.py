"""One figure and its interval out of the steps of `ledger_cost.py`.

**Estimator.** A round is two blocks with the ledger and two without, next to each other. For each
place in a block (the last one closes the books, so it costs more than the others) and each round
the difference is the mean of the two steps with it less that of the two without. Of a place's
differences the trimmed mean is taken, without the lowest and the highest fifth: those are steps in
which the machine did something else. The cost is the sum over the places, as a share of the sum of
the places' medians without the ledger.

Trimming does not bias: a round's difference changes its sign when its blocks are exchanged, so
without an effect differences lie symmetrically about zero, and both ends lose as many. An effect
that only a few steps had would be cut off; the recorder's rare work, closing the books, has a place
of its own. The interval is a bootstrap's (percentiles of 4,000 samples) over whole rounds, since
the steps of a round share their weather.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK = 10  # steps: what the recorder notes in a block it books in it, too
TRIM = 0.2
_NUM_SAMPLES = 4000


def estimate(rounds: list[list[list[int]]]) -> dict[str, Any]:
    """Return the cost in percent of a step, and its interval.

    A round is the microseconds of the steps of four blocks: on, off, off, on.
    """
    times = np.array(rounds) / 1e6  # [rounds, 4, BLOCK]
    if len(times) < 10:
        raise SystemExit(f"{len(times)} rounds are too few for an interval: give more --minutes")
    differences = (times[:, 0] - times[:, 1] - times[:, 2] + times[:, 3]) / 2  # [rounds, BLOCK]
    off = times[:, 1:3]
    off_s = float(np.median(off, axis=(0, 1)).sum())
    rng = np.random.default_rng(0)
    samples = [
        trimmed_sum(differences[rng.integers(0, len(times), len(times))])
        for _ in range(_NUM_SAMPLES)
    ]
    low, high = np.percentile(samples, (2.5, 97.5)) / off_s * 100
    return {
        "rounds": len(times),
        "step_ms_off": off_s / BLOCK * 1e3,
        "cost_percent": trimmed_sum(differences) / off_s * 100,
        "cost_percent_95": [float(low), float(high)],
    }


def trimmed_sum(differences: np.ndarray) -> float:
    """Return the sum over the columns of the trimmed mean of each."""
    num_cut = int(len(differences) * TRIM)
    kept = np.sort(differences, axis=0)[num_cut : len(differences) - num_cut]
    return float(kept.mean(axis=0).sum())
