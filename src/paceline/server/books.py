"""Books: what is remembered of one model's calls and steps. They outlast what is loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.config import EngineConfig
from paceline.cpu import default_num_threads
from paceline.engine.memory import kv_token_bytes
from paceline.engine.stats import NO_ENGINE, EngineStats
from paceline.server.calls import CallLog
from paceline.server.live import LiveView
from paceline.server.meters import CallMeters

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel
    from paceline.engine.engine import Engine
    from paceline.measure.recorder import StepRecorder


class Books:
    """Written on the event loop. What is counted goes on where it was when the model comes back."""

    def __init__(self, name: str, config: EngineConfig, *, is_encoder: bool = False) -> None:
        self.name = name
        self.is_encoder = is_encoder
        self.is_loaded = False
        self.config = config  # with every choice made, once the model was loaded
        self.calls = CallLog()
        self.meters = CallMeters()
        self.recorder: StepRecorder | None = None  # of the engine, or for the next one
        self.live = LiveView(None)
        self.about: dict[str, Any] | None = None  # None: it was never loaded
        self.num_loads = 0
        self._engine: Engine | None = None
        self._ended = NO_ENGINE  # totals of the engines before
        self._int8_macs = 0.0

    @property
    def engine(self) -> Engine | None:
        return self._engine

    def open(self, loaded: LoadedModel | None) -> None:
        """The model is loaded; an encoder (None) has no engine to tell of."""
        self.is_loaded = True
        self.num_loads += 1
        if loaded is not None:
            self._engine, self.config = loaded.engine, loaded.config
            self.recorder = self.live.recorder = loaded.recorder
            self.about = about(loaded)

    def close(self) -> None:
        """The model's engine has stopped: take its totals, and let go of it."""
        self.is_loaded = False
        self._ended, self._engine = self.stats(), None
        if self.recorder is not None:
            self.recorder.settle()
            self.recorder = self.live.recorder = self.recorder.successor()

    def stats(self) -> EngineStats:
        """Return the state of the engine, empty where there is none, and the totals of all."""
        return (NO_ENGINE if self._engine is None else self._engine.stats()).after(self._ended)

    @property
    def num_threads(self) -> int:
        return self.config.num_threads or default_num_threads()[0]

    def int8_macs(self) -> float:
        """Return the machine's int8 multiply-adds a second; 0: `paceline roofline` has not run.

        Files are read until it has: a server that runs takes up what was measured beside it.
        """
        if not self._int8_macs and self.config.backend == "native":
            from paceline.measure.ceilings import known_int8_macs

            self._int8_macs = known_int8_macs(self.num_threads)
        return self._int8_macs


def about(loaded: LoadedModel) -> dict[str, Any]:
    """Return what a server runs, and with which options: no path, nothing of any request."""
    config, model = loaded.config, loaded.checkpoint.config
    names = (
        "num_threads", "max_num_seqs", "max_batched_tokens", "max_model_len", "block_size",
        "kv_dtype", "policy", "prefix_cache", "activations", "speculate",
    )  # fmt: skip
    return {
        "version": __version__,
        "model": loaded.name,
        "isa": loaded.isa,
        "machine_threads": default_num_threads()[0],
        "num_blocks": loaded.kv.num_blocks,
        "kv_token_bytes": kv_token_bytes(model, config.kv_dtype),
        "weight_bytes": loaded.weight_bytes,
        "num_layers": model.num_layers,
        "num_parameters": sum(math.prod(t.shape) for t in loaded.checkpoint.tensors.values()),
        **{name: getattr(config, name) for name in names},
    }
