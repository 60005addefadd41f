"""Folders that `paceline quantize` wrote run on exactly the weights of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends.native import NativeBackend
from paceline.cli.quantize import build_method
from paceline.measure.quality import compare_logits, limits_for, sequence_logits
from paceline.models.base import build_plan
from paceline.quantize.formats import parse_target
from paceline.quantize.recipe import new_recipe
from paceline.quantize.rtn import RoundToNearest
from paceline.quantize.run import quantize
from paceline.quantize.source import open_source
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.safetensors import open_safetensors
from paceline.weights.tensor import QTensor, dequantize, from_floats
from tests.tiny import random_model, write_hf

# with the KL that each may cost: random weights spread logits far wider than trained ones do
TARGETS = [
    ("int4", "64", True, 0.5), ("int4", "128", False, 0.5), ("int8", "128", True, 0.005),
    ("int8", "32", False, 0.005), ("int8", "channel", False, 0.005), ("fp8", "64", None, 0.1),
    ("fp8", "channel", None, 0.1), ("q4_k", None, None, 0.5), ("q6_k", None, None, 0.05),
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that is a multiple of nothing, a tied embedding, and a mixture of columns."""
    model = random_model(
        "qwen2", hidden=256, inner=384, heads=4, head_dim=64, vocab_size=307,
        tie_word_embeddings=True,
    )  # fmt: skip
    return write_hf(model, tmp_path_factory.mktemp("source"), fmt="bf16")


def logits(
    checkpoint: Checkpoint, weights: Mapping[str, QTensor], activations: str
) -> npt.NDArray[np.float32]:
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 307, 40)]
    kv, limits = limits_for(64, block_size=16, rows=16)
    backend = NativeBackend(num_threads=2, activations=activations)
    backend.load(build_plan(checkpoint.config), weights, kv=kv, limits=limits)
    pieces = sequence_logits(backend, tokens, kv=kv, limits=limits)
    return np.concatenate([piece.copy() for piece in pieces])


@pytest.mark.parametrize(("fmt", "group", "symmetric", "price"), TARGETS)
def test_a_quantised_folder_runs_as_its_weights_written_out_in_floats(
    source: Path,
    tmp_path: Path,
    fmt: str,
    group: str | None,
    symmetric: bool | None,
    price: float,
) -> None:
    opened, target = open_source(source), parse_target(fmt, group, symmetric)
    recipe = new_recipe(opened, tmp_path / "out", method="rtn", target=target)
    quantize(opened, tmp_path / "out", recipe, RoundToNearest(), num_threads=2)
    checkpoint = open_checkpoint(tmp_path / "out")
    floats = {name: from_floats(dequantize(t)) for name, t in checkpoint.tensors.items()}
    exact = logits(checkpoint, checkpoint.tensors, "f32")
    np.testing.assert_array_equal(exact, logits(checkpoint, floats, "f32"))
    rounded = logits(checkpoint, checkpoint.tensors, "q8")
    assert compare_logits(exact, rounded).kl_mean < 5e-3
    original = open_checkpoint(source)
    lost = compare_logits(logits(original, original.tensors, "f32"), exact).kl_mean
    assert 1e-7 < lost < price


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_calibrated_folder_of_an_odd_vocabulary_runs_as_its_weights_written_out_in_floats(
    tmp_path: Path, method: str, is_tied: bool
) -> None:
    """160 columns of 128 make groups of 32; 307 rows of embedding and head no whole panel."""
    model = random_model(
        "qwen2", hidden=128, inner=160, heads=4, kv_heads=2, head_dim=32, vocab_size=307,
        tie_word_embeddings=is_tied,
    )  # fmt: skip
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh the cat sat"), 3000)))
    opened = open_source(write_hf(model, tmp_path / "source", fmt="bf16"))
    target = parse_target("int4", "128", None)
    chosen = build_method(method, opened, target, text, 512)
    recipe = new_recipe(
        opened, out, method=method, target=target, settings=chosen.settings,
        rewritten=chosen.rewrites(opened),
    )  # fmt: skip
    quantize(opened, out, recipe, chosen, num_threads=2)
    stored = open_safetensors(out / "model.safetensors")
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert ("lm_head.weight" in stored) != is_tied
    assert (stored[head].format, stored[head].shape) == ("i8_g128", (307, 128))
    checkpoint = open_checkpoint(out)
    floats = {name: from_floats(dequantize(t)) for name, t in checkpoint.tensors.items()}
    exact = logits(checkpoint, checkpoint.tensors, "f32")
    assert np.isfinite(exact).all()
    np.testing.assert_array_equal(exact, logits(checkpoint, floats, "f32"))
