"""StepWork: multiply-adds and bytes, against counting them one by one."""

import pytest

from paceline.measure.work import StepWork, step_work
from paceline.models.base import build_plan
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import random_model, write_gguf


def work(*layers_of_window):
    return StepWork(
        macs_per_token=100, macs_per_logit_row=10, macs_per_key=2, weight_bytes=7,
        kv_bytes_per_token=3, layers_of_window=layers_of_window,
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 5, 8, 100])
@pytest.mark.parametrize("num_computed", [0, 3, 7, 20])
@pytest.mark.parametrize("num_tokens", [1, 4, 30])
def test_keys_are_those_that_each_token_sees(window, num_computed, num_tokens):
    positions = range(num_computed, num_computed + num_tokens)
    seen = sum(min(p + 1, window) if window else p + 1 for p in positions)
    assert work((window, 4)).num_keys(num_computed, num_tokens) == 4 * seen


def test_layers_of_several_windows_add_up():
    both = work((0, 2), (4, 3))
    assert both.num_keys(10, 1) == 2 * 11 + 3 * 4
    assert both.kv_bytes(10, 1) == 3 * (2 * 11 + 3 * 5)
    assert both.macs(num_tokens=2, num_logit_rows=1, num_keys=5) == 200 + 10 + 10


def test_chunks_of_one_token_are_summed_at_once_to_the_same():
    both = work((0, 2), (4, 3))
    for contexts in ([], [0], [3], [4], [10, 0, 2, 3, 4, 5]):
        keys = sum(both.num_keys(seen, 1) for seen in contexts)
        read = sum(both.kv_bytes(seen, 1) for seen in contexts)
        assert both.decodes(contexts) == (keys, read)


@pytest.mark.parametrize("tied", [True, False])
def test_the_macs_of_a_token_are_those_of_the_plans_linears(tmp_path, tied):
    path = write_gguf(random_model("llama", tie_word_embeddings=tied), tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    plan = build_plan(checkpoint.config)
    per_rows = {"tokens": 0, "logits": 0}
    for op in plan.ops:
        if op.name == "linear":
            per_rows[op.out.rows] += op.inputs[0].cols * op.out.cols
    found = step_work(checkpoint.config, checkpoint.tensors, "f16")
    assert (found.macs_per_token, found.macs_per_logit_row) == (
        per_rows["tokens"], per_rows["logits"]
    )  # fmt: skip
