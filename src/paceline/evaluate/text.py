"""A text read by a model, and by a reference beside it: perplexity, KL, agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from paceline.backends.base import F32, Backend, KVSpec, StepLimits
from paceline.bench.statistics import quantile_figure
from paceline.config import EngineConfig
from paceline.engine.build import new_backend
from paceline.errors import ParameterError
from paceline.evaluate.figures import as_share, clustered_mean, exponential
from paceline.evaluate.state import State
from paceline.measure.quality import log_softmax, sequence_logits, windows
from paceline.models.base import build_plan
from paceline.text.tokenizer import Tokenizer
from paceline.weights.checkpoint import Checkpoint

Show = Callable[[str, int, int], None]  # what, done, total
TOP = 5
_ROWS = 32  # of logits at once: in float64 those of 150,000 tokens take 40 MB
_MAX_TOKENS = 256


class Reading(Struct, frozen=True, kw_only=True):
    """How a text is cut: windows of `context` tokens that move on by `stride`."""

    token_ids: list[int]
    sha256: str
    context: int
    stride: int
    bos_id: int | None  # stands before each window, where the model wants it

    def windows(self) -> list[tuple[int, int, int]]:
        """Return begin, end and first scored token of each; every token but one is scored once."""
        size = self.context - (self.bos_id is not None)
        return list(windows(len(self.token_ids), size, self.stride))


def read_text(path: Path, tokenizer: Tokenizer, *, context: int, stride: int) -> Reading:
    """Return the text of a UTF-8 file, ready to be read. Raises ParameterError."""
    if context < 4 or not 1 <= stride < context - 1:
        raise ParameterError(
            f"--context {context} and --stride {stride} make no windows: take a context of at "
            "least 4, and a stride at least 2 below it"
        )
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as a text: {error}") from None
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) < 2:
        raise ParameterError(f"{path} has {len(ids)} tokens: a text needs at least 2")
    return Reading(
        token_ids=ids, sha256=hashlib.sha256(data).hexdigest(), context=context, stride=stride,
        bos_id=tokenizer.bos_id if tokenizer.adds_bos else None,
    )  # fmt: skip


class Reader(Struct, frozen=True, kw_only=True):
    """A backend with a cache for one window."""

    backend: Backend
    kv: KVSpec
    limits: StepLimits

    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[F32]:
        """Yield the logits of rows `first` and later, in pieces that the next one overwrites."""
        return sequence_logits(self.backend, token_ids, kv=self.kv, limits=self.limits, first=first)


@contextmanager
def open_reader(checkpoint: Checkpoint, config: EngineConfig, context: int) -> Iterator[Reader]:
    """Yield a reader with the weights, KV format and activations that the config names."""
    if context > checkpoint.config.max_context:
        raise ParameterError(
            f"--context is {context}, the model's is {checkpoint.config.max_context} tokens: "
            "lower it"
        )
    weight_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    backend, _ = new_backend(checkpoint.path, config, weight_bytes)
    num_blocks = -(-context // config.block_size)
    kv = KVSpec(num_blocks=num_blocks, block_size=config.block_size, dtype=config.kv_dtype)
    limits = StepLimits(
        max_tokens=_MAX_TOKENS, max_logit_rows=_ROWS, max_seqs=1, max_blocks_per_seq=num_blocks
    )
    try:
        backend.load(build_plan(checkpoint.config), checkpoint.tensors, kv=kv, limits=limits)
        yield Reader(backend=backend, kv=kv, limits=limits)
    finally:
        backend.close()


def read(
    readers: Sequence[Reader], reading: Reading, state: State, show: Show, *, limit: int | None
) -> list[dict[str, list[float]]]:
    """Return each window's figures, token by token; those that the state knows are not computed."""
    found = []
    chosen = reading.windows()[:limit]
    for number, window in enumerate(chosen):
        show("text", number, len(chosen))
        key = f"text {number}"
        if key not in state:
            state.put(key, _read_window(readers, reading, window))
        found.append(state[key])
    return found


def _read_window(
    readers: Sequence[Reader], reading: Reading, window: tuple[int, int, int]
) -> dict[str, list[float]]:
    start, stop, first = window
    ids = reading.token_ids[start:stop]
    row = first - 1 - start  # its logits predict token `first`
    if reading.bos_id is not None:
        ids, row = [reading.bos_id, *ids], row + 1
    figures: dict[str, list[float]] = {}
    pieces = [reader.logits(ids[:-1], row) for reader in readers]
    for logits in zip(*pieces, strict=True):
        targets = ids[row + 1 : row + 1 + len(logits[0])]
        for name, values in compare(logits, targets).items():
            figures.setdefault(name, []).extend(values.tolist())
        row += len(targets)
    return figures


def compare(logits: Sequence[F32], targets: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return figures of each row: losses, and beside reference logits ([L, V] both) what differs.

    KL(reference || model) is in nats; `top5` is the share of the reference's five likeliest tokens
    that are among the model's five.
    """
    rows = np.arange(len(targets))
    logs = [log_softmax(values) for values in logits]
    for values in logs:
        if not np.isfinite(values[rows, list(targets)]).all():
            raise ParameterError(
                "the model gives logits that are no numbers: its weights, or its KV format, are "
                "broken"
            )
    out = {"loss": -logs[0][rows, list(targets)]}
    if len(logits) == 1:
        return out
    model, reference = logs
    out["reference_loss"] = -reference[rows, list(targets)]
    out["kl"] = np.maximum((np.exp(reference) * (reference - model)).sum(axis=-1), 0)
    out["top1"] = (logits[0].argmax(axis=-1) == logits[1].argmax(axis=-1)).astype(np.float64)
    count = min(TOP, logits[0].shape[-1])
    best, known = (np.argpartition(-v, count - 1, axis=-1)[:, :count] for v in logits)
    out["top5"] = (best[:, :, None] == known[:, None, :]).sum(axis=(1, 2)) / count
    return out


def summarise(reading: Reading, found: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the figures of a text with their 95 % intervals, windows taken as independent.

    The interval of `kl_p99` lies between two order statistics and takes tokens as independent.
    """
    column = {name: [window[name] for window in found] for name in found[0]}
    losses = clustered_mean(column["loss"])
    out: dict[str, Any] = {
        "sha256": reading.sha256, "context": reading.context, "stride": reading.stride,
        "num_tokens": len(reading.token_ids), "num_windows": len(found),
        "num_scored": sum(map(len, column["loss"])),
        "perplexity": exponential(losses).as_dict(),
    }  # fmt: skip
    if "kl" not in column:
        return out
    pairs = zip(column["loss"], column["reference_loss"], strict=True)
    difference = [np.subtract(ours, theirs).tolist() for ours, theirs in pairs]
    divergences = np.sort(np.concatenate(column["kl"]))
    return {
        **out,
        "reference_perplexity": exponential(clustered_mean(column["reference_loss"])).as_dict(),
        "perplexity_ratio": exponential(clustered_mean(difference)).as_dict(),
        "kl_mean": clustered_mean(column["kl"]).as_dict(),
        "kl_p99": quantile_figure(divergences, 0.99).as_dict(),
        "kl_max": float(divergences[-1]),
        "top1": as_share(clustered_mean(column["top1"])).as_dict(),
        "top5": as_share(clustered_mean(column["top5"])).as_dict(),
    }
