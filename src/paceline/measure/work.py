"""StepWork: the multiply-adds and the memory traffic that a model's steps ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from paceline.engine.memory import kv_token_bytes
from paceline.measure.bandwidth import EMBEDDING, decode_weight_bytes
from paceline.models.base import HEAD, ModelConfig
from paceline.weights.tensor import QTensor


class StepWork(Struct, frozen=True, kw_only=True):
    """What a token, a row of logits, an attended key and a step cost, for one model.

    Attention counts the keys that a token sees: all up to itself, or those in a layer's window.
    """

    macs_per_token: int  # linear layers, without the head
    macs_per_logit_row: int
    macs_per_key: int  # of one layer: scores and weighted sum
    weight_bytes: int  # read once a step
    kv_bytes_per_token: int  # of one layer
    layers_of_window: tuple[tuple[int, int], ...]  # (window, layers); window 0 sees everything

    def macs(self, *, num_tokens: int, num_logit_rows: int, num_keys: int) -> int:
        return (
            num_tokens * self.macs_per_token
            + num_logit_rows * self.macs_per_logit_row
            + num_keys * self.macs_per_key
        )

    def num_keys(self, num_computed: int, num_tokens: int) -> int:
        """Return how many keys a chunk's tokens see, over all layers."""
        total = 0
        end = num_computed + num_tokens
        for window, num_layers in self.layers_of_window:
            seen = num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2
            if window and end > window:
                first = max(num_computed, window)  # from this position on the window is full
                num_full = end - first
                growing = first - num_computed
                seen = num_full * window
                seen += growing * num_computed + growing * (growing + 1) // 2
            total += seen * num_layers
        return total

    def kv_bytes(self, num_computed: int, num_tokens: int) -> int:
        """Return the KV bytes that a chunk reads, each key and value once."""
        end = num_computed + num_tokens
        return self.kv_bytes_per_token * sum(
            (min(end, window + num_tokens) if window else end) * num_layers
            for window, num_layers in self.layers_of_window
        )

    def decodes(self, num_computed: Sequence[int]) -> tuple[int, int]:
        """Return the `num_keys` and the `kv_bytes` of chunks of one token each: the same sums."""
        num_chunks = len(num_computed)
        ends = sum(num_computed) + num_chunks
        keys = read = 0
        for window, num_layers in self.layers_of_window:
            if not window:
                keys += num_layers * ends
                read += num_layers * ends
            else:
                keys += num_layers * sum(min(seen + 1, window) for seen in num_computed)
                read += num_layers * (sum(min(seen, window) for seen in num_computed) + num_chunks)
        return keys, read * self.kv_bytes_per_token


def step_work(model: ModelConfig, tensors: Mapping[str, QTensor], kv_dtype: str) -> StepWork:
    """Return the work of a model whose weights are `tensors`."""
    matrices = {name: t for name, t in tensors.items() if len(t.shape) == 2}
    head = matrices.get(HEAD) or matrices[EMBEDDING]
    body = sum(
        t.shape[0] * t.shape[1] for name, t in matrices.items() if name not in (HEAD, EMBEDDING)
    )
    return StepWork(
        macs_per_token=body,
        macs_per_logit_row=head.shape[0] * head.shape[1],
        macs_per_key=2 * model.num_heads * model.head_dim,
        weight_bytes=decode_weight_bytes(model, tensors),
        kv_bytes_per_token=kv_token_bytes(model, kv_dtype) // model.num_layers,
        layers_of_window=tuple(sorted(Counter(model.window).items())),
    )
