"""What a lever costs in quality: perplexity, KL divergence and top-1 agreement, on any backend.

The backend is driven directly, one sequence at a time, so that the figures are the backend's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paceline.backends.base import F32, Backend, KVSpec, StepInput, StepLimits
from paceline.errors import ParameterError


class Perplexity(Struct, frozen=True):
    """exp of the mean negative log-likelihood of `num_tokens` tokens, with its standard error."""

    value: float
    stderr: float
    num_tokens: int


class Fidelity(Struct, frozen=True):
    """How far logits are from reference logits: KL(reference || other) in nats, same best token."""

    kl_mean: float
    kl_max: float
    top1_agreement: float
    num_rows: int


def limits_for(context: int, *, block_size: int, rows: int = 64) -> tuple[KVSpec, StepLimits]:
    """An f16 KV cache and step limits that hold one sequence of `context` tokens."""
    blocks = -(-context // block_size)
    kv = KVSpec(num_blocks=blocks, block_size=block_size, dtype="f16")
    limits = StepLimits(max_tokens=rows, max_logit_rows=rows, max_seqs=1, max_blocks_per_seq=blocks)
    return kv, limits


def sequence_logits(
    backend: Backend, token_ids: Sequence[int], *, kv: KVSpec, limits: StepLimits, first: int = 0
) -> Iterator[F32]:
    """Yield the logits of rows `first`, `first` + 1, … in pieces; each is overwritten by the next.

    The sequence starts at position 0 in block 0: what the backend's cache held is lost.
    """
    blocks = -(-len(token_ids) // kv.block_size)
    if blocks > min(kv.num_blocks, limits.max_blocks_per_seq):
        raise ParameterError(f"{len(token_ids)} tokens do not fit {kv.num_blocks} KV blocks")
    table = np.arange(blocks, dtype=np.int32)[None]
    tokens = np.asarray(token_ids, np.int32)
    start = 0
    while start < len(tokens):
        wants_logits = start >= first
        size = min(limits.max_tokens, limits.max_logit_rows) if wants_logits else limits.max_tokens
        stop = min(start + size, len(tokens) if wants_logits else first)
        positions = np.arange(start, stop, dtype=np.int32)
        rows = np.arange(stop - start if wants_logits else 0, dtype=np.int32)
        step = StepInput(
            tokens=tokens[start:stop], positions=positions, slots=positions,
            seqs=np.array([[0, stop - start, start]], np.int32), block_tables=table,
            logit_rows=rows,
        )  # fmt: skip
        logits = backend.forward(step).logits
        if wants_logits:
            yield logits
        start = stop


def perplexity(
    backend: Backend, token_ids: Sequence[int], *, kv: KVSpec, limits: StepLimits,
    context: int = 512, stride: int | None = None, bos_id: int | None = None,
) -> Perplexity:  # fmt: skip
    """Perplexity over windows of `context` tokens.

    Without `stride` the windows and scores are llama.cpp's: windows side by side, the second half
    of each scored, a remainder left out, and `bos_id` (if given) in the place of a window's first
    token. With `stride` the window slides by it, and each token is scored once, the first window's
    all: with `context` = 4 and `stride` = 2, tokens 1 2 3, then 4 5 after 2 3, and so on.
    """
    if context < 4 or (stride is not None and not 1 <= stride < context):
        raise ParameterError(f"context {context} and stride {stride} make no windows")
    losses: list[float] = []
    for start, stop, first in windows(len(token_ids), context, stride):
        window = list(token_ids[start:stop])
        if bos_id is not None:
            window[0] = bos_id
        row = first - 1 - start  # the row whose logits predict token `first`
        pieces = sequence_logits(backend, window[:-1], kv=kv, limits=limits, first=row)
        for logits in pieces:
            targets = window[row + 1 : row + 1 + len(logits)]
            losses += _losses(logits, targets)
            row += len(logits)
    if not losses:
        raise ParameterError(f"{len(token_ids)} tokens are too few for a context of {context}")
    mean = float(np.mean(losses))
    error = float(np.std(losses)) / math.sqrt(len(losses))
    return Perplexity(math.exp(mean), math.exp(mean) * error, len(losses))


def windows(total: int, context: int, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored token) of each window."""
    if stride is None:
        for start in range(0, total - context + 1, context):
            yield start, start + context, start + context // 2 + 1
        return
    scored = 1
    for start in range(0, total, stride):
        stop = min(start + context, total)
        if stop > scored:
            yield start, stop, scored
            scored = stop
        if stop == total:
            return


def log_softmax(logits: F32) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of each row, in float64."""
    values = logits.astype(np.float64)
    shifted: npt.NDArray[np.float64] = values - values.max(axis=-1, keepdims=True)
    total: npt.NDArray[np.float64] = np.exp(shifted).sum(axis=-1, keepdims=True)
    return shifted - np.log(total)


def _losses(logits: F32, targets: Sequence[int]) -> list[float]:
    rows = np.arange(len(targets))
    losses: list[float] = (-log_softmax(logits)[rows, list(targets)]).tolist()
    return losses


def compare_logits(reference: F32, logits: F32) -> Fidelity:
    """KL divergence and top-1 agreement of two [L, V] logit sets, row by row."""
    p, q = log_softmax(reference), log_softmax(logits)
    divergence = np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0)
    agreement = reference.argmax(axis=-1) == logits.argmax(axis=-1)
    return Fidelity(
        kl_mean=float(divergence.mean()), kl_max=float(divergence.max()),
        top1_agreement=float(agreement.mean()), num_rows=len(divergence),
    )  # fmt: skip
