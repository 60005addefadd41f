"""OpenVINO GenAI's continuous batching pipeline, which reads GGUF files, behind the OpenAI API."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from paceline.bench.adapters.shell import Piece, main

_CACHE_GB = 2


@dataclass(slots=True)
class _Stream:
    handle: Any
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    text: str = ""


class OpenVino:
    """Its prefix cache is on, as it is by default."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name = Path(options.model).stem
        self.num_slots: int = options.slots
        self.context: int = options.context
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = self.num_slots
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._streams: dict[int, _Stream] = {}

    def encode(self, messages: list[dict[str, Any]] | None, prompt: str | None) -> list[int]:
        if messages is None:
            inputs = self._tokenizer.encode(prompt or "").input_ids
        else:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            inputs = self._tokenizer.encode(text, add_special_tokens=False).input_ids
        return [int(token) for token in inputs.data[0]]

    def submit(self, stream: int, ids: list[int], max_tokens: int, ignore_eos: bool) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        if not ignore_eos:
            config.set_eos_token_id(self._tokenizer.get_eos_token_id())
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        handle = self._pipeline.add_request(stream, prompt, config)
        self._streams[stream] = _Stream(handle, max_tokens)

    def step(self) -> Iterable[Piece]:
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [piece for key in list(self._streams) for piece in self._read(key)]

    def drop(self, stream: int) -> None:
        self._streams.pop(stream).handle.cancel()

    def _read(self, key: int) -> Iterable[Piece]:
        stream = self._streams[key]
        num_new = 0
        while stream.handle.can_read():
            for output in stream.handle.read().values():
                stream.ids += output.generated_ids
                num_new += len(output.generated_ids)
        is_over = stream.handle.get_status() != genai.GenerationStatus.RUNNING
        if not num_new and not is_over:
            return
        text = self._tokenizer.decode(stream.ids)
        fresh = ""
        if is_over or not text.endswith("\ufffd"):  # half a character waits for its rest
            fresh, stream.text = text[len(stream.text) :], text
        reason = None
        if is_over:
            reason = "length" if len(stream.ids) >= stream.max_tokens else "stop"
        yield Piece(key, fresh, num_new, reason)


if __name__ == "__main__":
    main(OpenVino)
