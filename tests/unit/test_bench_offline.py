"""`paceline bench offline` at Ctrl-C: what was measured is reported."""

import pytest

from paceline.bench import offline
from paceline.bench.offline import Batch, Cell, grid, measure

BATCH = Batch(
    ttft_s=1.0, prefill_tokens_per_s=2.0, decode_tokens_per_s=None, output_tokens_per_s=3.0,
    total_tokens_per_s=4.0, e2e_s=5.0,
)  # fmt: skip
CELLS = list(grid([1, 2], [8], 4))


def interrupt_after(num_batches: int, monkeypatch) -> None:
    left = iter(range(num_batches))

    def run_batch(loaded, cell: Cell, rng) -> Batch:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return BATCH

    monkeypatch.setattr(offline, "run_batch", run_batch)


def test_ctrl_c_leaves_the_rows_of_the_batches_that_were_whole(monkeypatch):
    interrupt_after(2 + 3, monkeypatch)  # a round that warms up, one and a half that count
    rows, is_interrupted = measure(None, CELLS, 3)
    assert is_interrupted
    assert [(row["batch"], row["rounds"]) for row in rows] == [(1, 2), (2, 1)]


def test_ctrl_c_before_anything_was_measured_ends_the_command(monkeypatch):
    interrupt_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measure(None, CELLS, 3)


def test_a_run_to_its_end_is_not_interrupted(monkeypatch):
    interrupt_after(2 * 4, monkeypatch)
    rows, is_interrupted = measure(None, CELLS, 3)
    assert not is_interrupted
    assert [row["rounds"] for row in rows] == [3, 3]
