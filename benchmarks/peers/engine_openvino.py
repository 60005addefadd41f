"""OpenVINO GenAI's continuous batching pipeline, which reads the GGUF file itself.

Files that it cannot read (Q5_0 among them) need a copy in a format that it can: `--model-for`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

_NUM_IDS = 40000  # every vocabulary here is larger; prompts need no more
_CACHE_GB = 2


class Engine:
    """Streams in one pipeline, without its prefix cache. `plugin` options go to the CPU device."""

    def __init__(
        self, model: str, *, num_threads: int, context: int, num_streams: int,
        max_num_batched_tokens: int = 512, **plugin: Any,
    ) -> None:  # fmt: skip
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = num_streams
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        properties = {"INFERENCE_NUM_THREADS": num_threads, **plugin}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._context = context
        self._handles: dict[int, Any] = {}
        self.num_ids = _NUM_IDS

    def submit(self, stream: int, token_ids: Sequence[int]) -> None:
        """Begin a stream that goes on until it is dropped or its context is full."""
        config = genai.GenerationConfig()
        config.max_new_tokens = self._context - len(token_ids)
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        self._handles[stream] = self._pipeline.add_request(stream, prompt, config)

    def step(self) -> list[int]:
        """Run one step; return the streams that got a token in it."""
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        got = []
        for stream, handle in self._handles.items():
            if handle.can_read():
                got += [stream for output in handle.read().values() for _ in output.generated_ids]
        return got

    def drop(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._handles.pop(stream).cancel()
