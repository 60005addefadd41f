"""What `paceline roofline` measured prices the first steps of those who plan by their cost."""

from __future__ import annotations

import pytest

from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.engine.known_costs import KnownCosts, known_costs
from paceline.measure import step_table
from paceline.measure.machine import Machine
from paceline.measure.step_table import Curve, StepTable
from tests.tiny import random_model, write_gguf

PREFILL = tuple((2**i, 0.001 + 1e-4 * 2**i) for i in range(10))
VERIFY = ((1, 0.001), (8, 0.002))


@pytest.fixture
def table(monkeypatch):
    """A table for any model; returns what it was asked for."""
    asked = []
    kept = StepTable(
        model="m",
        machine=Machine(cpu="c", num_cores=1, quota=None, isa="avx2", version="0"),
        num_threads=1, kv_dtype="f16", block_size=16,
        curves=(
            Curve(kind="prefill", context=0, points=PREFILL),
            Curve(kind="prefill", context=1024, points=((1, 9.0),)),
            Curve(kind="verify", context=0, points=VERIFY),
        ),
    )  # fmt: skip

    def read(path, **options):
        asked.append((path, options))
        return kept

    monkeypatch.setattr(step_table, "read_step_table", read)
    return asked


@pytest.mark.parametrize("options", [{"policy": "slo:step_ms=20"}, {"speculate": "ngram"}], ids=str)
def test_the_table_of_these_options_is_what_is_known(table, tmp_path, options):
    config = EngineConfig(num_threads=1, kv_dtype="f32", block_size=32, **options)
    assert known_costs(tmp_path, config) == KnownCosts(PREFILL, VERIFY)
    assert table == [(tmp_path, {"num_threads": 1, "kv_dtype": "f32", "block_size": 32})]


def test_nothing_is_looked_up_where_nobody_plans_by_it(table, tmp_path):
    assert known_costs(tmp_path, EngineConfig(num_threads=1)) == KnownCosts()
    assert table == []


@pytest.mark.usefixtures("table")
def test_a_bound_on_steps_is_priced_before_the_first_step(tmp_path):
    path = write_gguf(random_model("llama"), tmp_path / "tiny.gguf")
    options = {"kv_memory_bytes": 2**20, "num_threads": 1, "policy": "slo:step_ms=21"}
    loaded = load_model(str(path), EngineConfig(**options))
    try:
        policy = loaded.engine._scheduler.policy
        assert policy.num_fitting() == pytest.approx(200, abs=1)
        for _ in range(200):  # what is measured takes over: steps of twice the cost
            for num_tokens in (1, 64):
                policy.observe(num_tokens, 2 * (0.001 + 1e-4 * num_tokens))
        assert policy.num_fitting() == pytest.approx(95, abs=2)
    finally:
        loaded.engine.stop()


def test_without_a_table_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(step_table, "read_step_table", lambda path, **options: None)
    assert known_costs(tmp_path, EngineConfig(num_threads=1, policy="slo")) == KnownCosts()
