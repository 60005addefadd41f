"""llama.cpp through its C API, scheduled as its own server does it.

A step is one `llama_decode`: a token of each stream that decodes, then as much of the waiting
prompts as `n_batch` leaves. The greedy choice is an argmax over the raw logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp as api
import numpy as np


class Engine:
    """Streams in one llama context with a sequence id each."""

    def __init__(
        self,
        model: str,
        *,
        num_threads: int,
        context: int,
        num_streams: int,
        use_extra_bufts: bool = True,
        flash_attn: bool = True,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        kv_unified: bool = False,
    ) -> None:
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        self._model = _load(model, use_extra_bufts)
        params = api.llama_context_default_params()
        params.n_ctx = -(-context // 256) * 256 * num_streams
        params.n_batch = n_batch
        params.n_ubatch = min(n_ubatch, n_batch)
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = int(flash_attn)
        params.kv_unified = kv_unified
        self._ctx = api.llama_init_from_model(self._model, params)
        if self._ctx is None:
            raise RuntimeError(f"llama.cpp could not make a context of {params.n_ctx} tokens")
        self._batch = api.llama_batch_init(n_batch, 0, 1)
        self._num_batch = n_batch
        self.num_ids = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._free = list(range(num_streams))
        self._seq_ids: dict[int, int] = {}
        self._pending: dict[int, list[int]] = {}  # tokens that the next steps compute
        self._positions: dict[int, int] = {}

    def submit(self, stream: int, token_ids: Sequence[int]) -> None:
        """Begin a stream that goes on until it is dropped."""
        self._seq_ids[stream] = self._free.pop()
        self._pending[stream] = list(token_ids)
        self._positions[stream] = 0

    def step(self) -> list[int]:
        """Run one step; return the streams that got a token in it."""
        # Decodes (one token pending) come first; a prompt takes what they leave.
        rows: dict[int, int] = {}
        self._batch.n_tokens = 0
        for stream in sorted(self._pending, key=lambda s: len(self._pending[s]) > 1):
            pending = self._pending[stream]
            num_taken = min(len(pending), self._num_batch - self._batch.n_tokens)
            if num_taken == 0:
                continue
            self._add(stream, pending[:num_taken], wants_logits=num_taken == len(pending))
            if num_taken == len(pending):
                rows[stream] = self._batch.n_tokens - 1
            del pending[:num_taken]
        if self._batch.n_tokens == 0:
            return []
        status = api.llama_decode(self._ctx, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        for stream, row in rows.items():
            logits = api.llama_get_logits_ith(self._ctx, row)
            choice = np.ctypeslib.as_array(logits, shape=(self.num_ids,)).argmax()
            self._pending[stream] = [int(choice)]
        return list(rows)

    def drop(self, streams: Iterable[int]) -> None:
        for stream in streams:
            seq_id = self._seq_ids.pop(stream)
            api.llama_memory_seq_rm(api.llama_get_memory(self._ctx), seq_id, -1, -1)
            self._free.append(seq_id)
            del self._pending[stream], self._positions[stream]

    def _add(self, stream: int, token_ids: Sequence[int], *, wants_logits: bool) -> None:
        batch, position = self._batch, self._positions[stream]
        for offset, token_id in enumerate(token_ids):
            row = batch.n_tokens + offset
            batch.token[row] = token_id
            batch.pos[row] = position + offset
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = self._seq_ids[stream]
            batch.logits[row] = False
        batch.n_tokens += len(token_ids)
        batch.logits[batch.n_tokens - 1] = wants_logits
        self._positions[stream] = position + len(token_ids)


def _load(model: str, use_extra_bufts: bool) -> Any:
    """Return the model, with its weights repacked for this CPU's kernels or as they are."""
    params = api.llama_model_default_params()
    params.use_extra_bufts = use_extra_bufts
    loaded = api.llama_model_load_from_file(model.encode(), params)
    if loaded is None:
        raise RuntimeError(f"llama.cpp could not load {model}")
    return loaded
