"""transformers on torch, over the dequantised weights of the GGUF file.

It has no scheduler: streams that wait are computed together, and then decode in lockstep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch  # noqa: TID251
import transformers  # noqa: TID251


class Engine:
    """One batch of streams of equal length with a dynamic KV cache."""

    def __init__(
        self, model: str, *, num_threads: int, context: int, num_streams: int,
        dtype: str = "bfloat16", attn_implementation: str = "sdpa",
    ) -> None:  # fmt: skip
        torch.set_num_threads(num_threads)
        path = Path(model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
        ).eval()  # fmt: skip
        self.num_ids = int(self._model.config.vocab_size)
        self._streams: list[int] = []
        self._next: torch.Tensor | None = None  # [B, tokens to compute]
        self._cache: Any = None

    def submit(self, stream: int, token_ids: Sequence[int]) -> None:
        """Add a stream to a batch that has not begun. Precondition: equally long prompts."""
        assert self._cache is None, "a batch that has begun takes no more streams"
        self._streams.append(stream)
        row = torch.tensor([token_ids])
        self._next = row if self._next is None else torch.cat([self._next, row])

    def step(self) -> list[int]:
        """Run one step; return the streams that got a token in it."""
        if self._next is None:
            return []
        with torch.inference_mode():
            out = self._model(
                input_ids=self._next, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = out.past_key_values
        self._next = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        return list(self._streams)

    def drop(self, streams: Iterable[int]) -> None:
        """End the batch. Precondition: `streams` are all of it."""
        assert sorted(streams) == self._streams
        self._streams, self._next, self._cache = [], None, None
