"""llama.cpp behind the OpenAI API, scheduled as its own server does it: a step is a token of each
stream that decodes and as much of the waiting prompts as the batch holds."""

from __future__ import annotations

import argparse
import codecs
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from paceline.bench.adapters.shell import Piece, main

_NUM_BATCH = 2048  # the defaults of llama-server
_NUM_UBATCH = 512


@dataclass(slots=True)
class _Stream:
    slot: int
    pending: list[int]  # tokens that the next steps compute
    max_tokens: int
    ignore_eos: bool
    position: int = 0
    num_tokens: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class LlamaCpp:
    """Sequences of one context, greedy from the raw logits."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name = Path(options.model).stem
        self.num_slots: int = options.slots
        self.context: int = options.context
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        model = api.llama_model_load_from_file(
            options.model.encode(), api.llama_model_default_params()
        )
        if model is None:
            raise SystemExit(f"llama.cpp cannot load {options.model}")
        params = api.llama_context_default_params()
        params.n_ctx = self.context * self.num_slots
        params.n_batch, params.n_ubatch = _NUM_BATCH, _NUM_UBATCH
        params.n_seq_max = self.num_slots
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = 1
        self._ctx = api.llama_init_from_model(model, params)
        if self._ctx is None:
            raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._vocab = api.llama_model_get_vocab(model)
        self._num_ids = int(api.llama_vocab_n_tokens(self._vocab))
        template = api.llama_model_chat_template(model, None)
        self._format = None if template is None else self._formatter(template.decode())
        self._batch = api.llama_batch_init(_NUM_BATCH, 0, 1)
        self._free = list(range(self.num_slots))
        self._streams: dict[int, _Stream] = {}

    def _formatter(self, template: str) -> Any:
        special = [api.llama_vocab_eos(self._vocab), api.llama_vocab_bos(self._vocab)]
        eos, bos = (self._piece(token).decode("utf-8", "replace") for token in special)
        return Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)

    def encode(self, messages: list[dict[str, Any]] | None, prompt: str | None) -> list[int]:
        text = prompt or ""
        if messages is not None:
            if self._format is None:
                raise ValueError("the model has no chat template")
            text = self._format(messages=messages).prompt
        data = text.encode()
        room = len(data) + 8
        ids = (api.llama_token * room)()
        count = api.llama_tokenize(
            self._vocab, data, len(data), ids, room, messages is None, messages is not None
        )
        return list(ids[:count])

    def submit(self, stream: int, ids: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self._streams[stream] = _Stream(self._free.pop(), list(ids), max_tokens, ignore_eos)

    def step(self) -> Iterable[Piece]:
        rows: dict[int, int] = {}
        self._batch.n_tokens = 0
        # Decodes (one token pending) come first; a prompt takes what they leave.
        for key in sorted(self._streams, key=lambda key: len(self._streams[key].pending) > 1):
            stream = self._streams[key]
            num_taken = min(len(stream.pending), _NUM_BATCH - self._batch.n_tokens)
            if num_taken == 0:
                continue
            is_last = num_taken == len(stream.pending)
            self._add(stream, stream.pending[:num_taken], wants_logits=is_last)
            del stream.pending[:num_taken]
            if is_last:
                rows[key] = self._batch.n_tokens - 1
        if status := api.llama_decode(self._ctx, self._batch):
            raise SystemExit(f"llama_decode failed with status {status}")
        return [self._choose(key, row) for key, row in rows.items()]

    def drop(self, stream: int) -> None:
        slot = self._streams.pop(stream).slot
        api.llama_memory_seq_rm(api.llama_get_memory(self._ctx), slot, -1, -1)
        self._free.append(slot)

    def _add(self, stream: _Stream, ids: list[int], *, wants_logits: bool) -> None:
        batch = self._batch
        for row, token in enumerate(ids, start=batch.n_tokens):
            batch.token[row] = token
            batch.pos[row] = stream.position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = stream.slot
            batch.logits[row] = False
            stream.position += 1
        batch.n_tokens += len(ids)
        batch.logits[batch.n_tokens - 1] = wants_logits

    def _choose(self, key: int, row: int) -> Piece:
        logits = api.llama_get_logits_ith(self._ctx, row)
        token = int(np.ctypeslib.as_array(logits, shape=(self._num_ids,)).argmax())
        stream = self._streams[key]
        if not stream.ignore_eos and api.llama_vocab_is_eog(self._vocab, token):
            return Piece(key, "", 0, "stop")
        stream.num_tokens += 1
        stream.pending = [token]
        is_over = stream.num_tokens >= stream.max_tokens
        text = stream.decoder.decode(self._piece(token), final=is_over)
        return Piece(key, text, 1, "length" if is_over else None)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(128)
        size = api.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(size, 0)]


if __name__ == "__main__":
    main(LlamaCpp)
