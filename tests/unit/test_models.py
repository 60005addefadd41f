"""What families read from configs, and the plans they build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline.models
from paceline.loading import available, load
from paceline.models.base import (
    ModelConfig,
    build_plan,
    llama3_rope,
    rope_frequencies,
    weight_shapes,
    yarn_rope,
)
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import gguf_bytes, gguf_metadata, gguf_tensors, random_model, write_gguf, write_hf

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}


def config_of(family: str, tmp_path: Path, **fields: Any) -> ModelConfig:
    model = random_model(FAMILIES[family], **fields)
    return open_checkpoint(write_hf(model, tmp_path)).config


def test_the_families_are_those_of_the_tests() -> None:
    assert available("models") == sorted([*FAMILIES, "bert"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_what_the_checkpoint_asks_of_it(family: str) -> None:
    module = load("models", family)
    assert isinstance(module.GGUF_ARCHITECTURES, tuple)
    assert isinstance(module.HF_TYPES, tuple)
    assert isinstance(module.INTERLEAVED_ROPE, bool)
    assert module.NORM_OFFSET in (0.0, 1.0)
    assert "token_embd" in module.GGUF_NAMES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_reads_each_tensor_of_its_model_and_no_other(family: str, tmp_path: Path) -> None:
    model = random_model(FAMILIES[family])
    config = open_checkpoint(write_hf(model, tmp_path)).config
    shapes = weight_shapes(build_plan(config), config.vocab_size)
    assert shapes == {name: value.shape for name, value in model.tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_stores_and_attends_once_a_layer(family: str, tmp_path: Path) -> None:
    plan = build_plan(config_of(family, tmp_path, layers=3))
    layers = [op.attrs["layer"] for op in plan.ops if op.name == "attention"]
    assert layers == [0, 1, 2]
    assert [op.name for op in plan.ops].count("select") == 1
    assert plan.outputs["logits"].rows == "logits"


def test_gemma_alternates_windows_and_ropes(tmp_path: Path) -> None:
    model = random_model("gemma3_text", layers=7, sliding_window=32, sliding_window_pattern=6)
    for path in (write_hf(model, tmp_path / "m"), write_gguf(model, tmp_path / "m.gguf")):
        config = open_checkpoint(path).config
        assert config.window == (32,) * 5 + (0,) + (32,)
        slowest = [table.inv_freq[-1] for table in config.rope]
        assert slowest[5] < slowest[0] == slowest[6]
        assert config.embed_scale == 8.0


def test_gemma_reads_a_pattern_given_layer_by_layer(tmp_path: Path) -> None:
    model = random_model("gemma3_text", layers=3)
    key = "gemma3.attention.sliding_window_pattern"
    meta = gguf_metadata(model) | {key: [False, True, False]}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(meta, gguf_tensors(model)))
    assert open_checkpoint(path).config.window == (0, 16, 0)


def test_gemma_caps_scores_and_logits_where_configured(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    plan = build_plan(config_of("gemma3", tmp_path, **caps))
    assert {op.attrs["softcap"] for op in plan.ops if op.name == "attention"} == {50.0}
    assert plan.ops[-1].name == "softcap"
    assert plan.ops[-1].attrs["cap"] == 30.0


def test_the_27b_gemma_scales_queries_by_hidden_size_over_heads(tmp_path: Path) -> None:
    model = random_model("gemma3_text", layers=62, heads=2, head_dim=16, inner=32)
    config = open_checkpoint(write_gguf(model, tmp_path / "m.gguf")).config
    assert config.attention_scale == pytest.approx(32**-0.5)


def test_llama3_rope_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    inv_freq = rope_frequencies(64, 500_000.0)
    table = llama3_rope(inv_freq, factor=8.0, low=1.0, high=4.0, context=8192)
    ratio = np.array(table.inv_freq) / inv_freq
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert (np.diff(ratio) <= 0).all()


def test_yarn_scales_cos_and_sin_and_interpolates_by_parts() -> None:
    table = yarn_rope(64, 10_000.0, factor=4.0, context=4096)
    ratio = np.array(table.inv_freq) / rope_frequencies(64, 10_000.0)
    assert table.mscale == pytest.approx(0.1 * np.log(4) + 1)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 4)
    assert yarn_rope(64, 10_000.0, factor=1.0, context=4096).mscale == 1.0


def test_the_older_rope_parameters_and_the_newer_agree(tmp_path: Path) -> None:
    old = random_model("llama", rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5e4)
    new = random_model("llama")
    del new.config["rope_theta"]
    new.config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    tables = [
        open_checkpoint(write_hf(model, tmp_path / name)).config.rope
        for model, name in ((old, "old"), (new, "new"))
    ]
    assert tables[0] == tables[1]


def test_the_family_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[2] / "docs" / "add-a-model.md"
    code = re.search(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "nimbus.py").write_text(code[1])
    monkeypatch.setattr(paceline.models, "__path__", [*paceline.models.__path__, str(tmp_path)])
    model = random_model("qwen3", final_logit_softcapping=2.0).with_config(model_type="nimbus")
    config = open_checkpoint(write_hf(model, tmp_path / "m")).config
    assert (config.family, config.qk_norm, config.logit_softcap) == ("nimbus", True, 2.0)
    assert build_plan(config).ops[-1].name == "softcap"
