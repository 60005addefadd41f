"""Fixtures that all tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import KVSpec, StepLimits
from paceline.backends.reference import ReferenceBackend
from paceline.errors import PacelineError
from paceline.measure.quality import sequence_logits
from paceline.models.base import build_plan
from paceline.weights.checkpoint import Checkpoint

# A shell's background job (`pytest &` in a script) is started with Ctrl-C ignored, one under nohup
# with SIGHUP, and so would be all commands that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """`real_model(name)` is the path of a pulled catalogue model; skips where it cannot be had.

    SmolLM2 is pulled if need be; larger models are used only where they already are.
    """

    def find(name: str) -> Path:
        from paceline.catalog import resolve

        try:
            return resolve(name, pull=name == "smollm2-135m")
        except PacelineError as error:
            pytest.skip(f"{name} is not here: run `paceline pull {name}` ({error})")

    return find


def reference_logits(
    checkpoint: Checkpoint, token_ids: list[int], *, kv_dtype: str = "f32"
) -> np.ndarray:
    """Logits of every row [T, V], through the family's plan and the reference backend."""
    blocks = -(-len(token_ids) // 16)
    kv = KVSpec(num_blocks=blocks, block_size=16, dtype=kv_dtype)
    limits = StepLimits(
        max_tokens=len(token_ids), max_logit_rows=len(token_ids), max_seqs=1,
        max_blocks_per_seq=blocks,
    )  # fmt: skip
    backend = ReferenceBackend()
    backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
    return np.concatenate(list(sequence_logits(backend, token_ids, kv=kv, limits=limits)))
