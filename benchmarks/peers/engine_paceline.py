"""Paceline behind the interface that `worker.py` and `serve_steps.py` drive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.config import EngineConfig
from paceline.engine.build import load_model
from paceline.types import Delta, Request, SamplingParams


class Engine:
    """Greedy streams through the whole engine: scheduler, kernels, sampler, stream decoder."""

    def __init__(
        self, model: str, *, num_threads: int, context: int, num_streams: int, **options: Any
    ) -> None:
        config = EngineConfig(
            num_threads=num_threads,
            max_model_len=context,
            max_num_seqs=num_streams,
            prefix_cache=False,
            **options,
        )
        self._loaded = load_model(model, config)
        self._context = context
        self._got: list[int] = []
        self.num_ids = self._loaded.tokenizer.vocab_size

    def submit(self, stream: int, token_ids: Sequence[int]) -> None:
        """Begin a stream that goes on until it is dropped or its context is full."""

        def sink(delta: Delta) -> None:
            self._got.extend(stream for _ in delta.token_ids)

        num_left = self._context - len(token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=num_left, ignore_eos=True)
        request = Request(id=str(stream), prompt_token_ids=tuple(token_ids), params=params)
        self._loaded.engine.submit(request, sink)

    def step(self) -> list[int]:
        """Run one step; return the streams that got a token in it."""
        self._got.clear()
        self._loaded.engine.step()
        return list(self._got)

    def drop(self, streams: Iterable[int]) -> None:
        for stream in streams:
            self._loaded.engine.abort(str(stream))
        self._loaded.engine.step()  # the aborts are read before a step
