"""Perplexity and fidelity, checked against a model whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.reference import ReferenceBackend
from paceline.errors import ParameterError
from paceline.measure.quality import (
    compare_logits,
    limits_for,
    perplexity,
    sequence_logits,
    windows,
)
from paceline.models.base import build_plan
from paceline.weights.checkpoint import open_checkpoint
from tests.tiny import TinyModel, context_free_model, random_model, write_hf


def loaded(
    model: TinyModel, folder: Path, context: int = 64, rows: int = 5
) -> tuple[ReferenceBackend, dict[str, Any]]:
    checkpoint = open_checkpoint(write_hf(model, folder))
    kv, limits = limits_for(context, block_size=16, rows=rows)
    backend = ReferenceBackend()
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    return backend, {"kv": kv, "limits": limits}


def test_perplexity_of_a_fixed_distribution_is_its_own(tmp_path: Path) -> None:
    p = {7: 0.5, 8: 0.25, 9: 0.25}
    model = context_free_model({t: math.log(v) for t, v in p.items()}, other=-60.0)
    backend, how = loaded(model, tmp_path)
    text = [7, 8, 9, 7] * 16
    expected = math.exp(-(0.5 * math.log(0.5) + 0.5 * math.log(0.25)))
    result = perplexity(backend, text, context=16, **how)
    assert result.num_tokens == 4 * 7
    # Each window scores its tokens 9 to 15: 8 9 7 7 8 9 7.
    exact = math.exp(-(3 * math.log(0.5) + 4 * math.log(0.25)) / 7)
    assert result.value == pytest.approx(exact, rel=1e-4)
    slid = perplexity(backend, [*text, 7], context=16, stride=8, **how)
    assert slid.num_tokens == 64
    assert slid.value == pytest.approx(expected, rel=1e-4)


def test_windows_are_llama_cpps_or_slide_and_score_each_token_once() -> None:
    assert list(windows(20, 8, None)) == [(0, 8, 5), (8, 16, 13)]
    sliding = list(windows(11, 6, 2))
    assert sliding == [(0, 6, 1), (2, 8, 6), (4, 10, 8), (6, 11, 10)]
    scored = [t for _, stop, first in sliding for t in range(first, stop)]
    assert scored == list(range(1, 11))


def test_logits_in_pieces_are_those_of_one_step(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 280, 23).tolist()
    backend, how = loaded(random_model(), tmp_path, rows=4)
    pieces = [p.copy() for p in sequence_logits(backend, text, first=9, **how)]
    assert [len(p) for p in pieces] == [4, 4, 4, 2]
    whole, how = loaded(random_model(), tmp_path, rows=32)
    (expected,) = list(sequence_logits(whole, text, first=0, **how))
    np.testing.assert_allclose(np.concatenate(pieces), expected[9:], atol=1e-4)


def test_a_text_too_short_or_windows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    backend, how = loaded(random_model(), tmp_path)
    with pytest.raises(ParameterError, match="too few"):
        perplexity(backend, [1, 2, 3], context=16, **how)
    with pytest.raises(ParameterError, match="make no windows"):
        perplexity(backend, [1] * 99, context=16, stride=16, **how)
    with pytest.raises(ParameterError, match="do not fit"):
        perplexity(backend, [1] * 999, context=256, **how)


def test_fidelity_of_equal_and_of_known_logits() -> None:
    a = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32))
    same = compare_logits(a, a + 3)
    assert same.kl_max == pytest.approx(0, abs=1e-6)
    assert same.top1_agreement == 1.0
    b = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]], np.float32))
    other = compare_logits(a, b)
    assert other.kl_max == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert other.kl_mean == pytest.approx(other.kl_max / 2)
    assert other.top1_agreement == 0.5
    assert other.num_rows == 2
