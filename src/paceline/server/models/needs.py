"""Needs: how much memory each model of a server takes, known before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.embedding.build import encoder_kv_bytes, encoder_len
from paceline.engine.memory import format_bytes, size_kv
from paceline.engine.speculation.load import open_draft, parse_speculate
from paceline.errors import ParameterError
from paceline.models.base import ModelConfig
from paceline.weights.checkpoint import open_checkpoint


class Need(Struct, frozen=True, kw_only=True):
    """What one model takes: its weights, with those of its draft model, and its KV pool.

    An encoder has a KV cache of one step.
    """

    weight_bytes: int
    kv_bytes: int
    max_model_len: int
    available_bytes: int = 0  # what its loading is told that there is

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def plan_needs(
    paths: Mapping[str, Path], config: EngineConfig, *, memory_bytes: int
) -> dict[str, Need]:
    """Return the need of each named model, where all of them together have `memory_bytes`.

    Without --kv-memory a model's pool is what it would be alone, divided by the number of models
    that write, and beside the weights of all; where not all weights fit at once, beside its own.
    Raises ParameterError naming a model that does not fit even by itself.
    """
    draft = open_draft(parse_speculate(config.speculate), config)
    draft_bytes = 0 if draft is None else draft.weight_bytes
    needs: dict[str, Need] = {}
    models: dict[str, tuple[ModelConfig, int]] = {}  # that write
    for name, path in paths.items():
        checkpoint = open_checkpoint(path)
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        if checkpoint.config.is_causal:
            models[name] = checkpoint.config, num_bytes + draft_bytes
        else:
            needs[name] = _encoder_need(name, checkpoint.config, config, num_bytes, memory_bytes)
    all_weights = sum(num_bytes for _, num_bytes in models.values())
    all_weights += sum(need.num_bytes for need in needs.values())
    for name, (model, weight_bytes) in models.items():
        beside = all_weights if all_weights < memory_bytes else weight_bytes
        share = (memory_bytes - beside) // len(models)
        if config.kv_memory_bytes is not None:
            share = memory_bytes - weight_bytes
        needs[name] = _need(name, model, config, weight_bytes, max(share, 0), memory_bytes)
    return needs


def _encoder_need(
    name: str, model: ModelConfig, config: EngineConfig, weight_bytes: int, memory_bytes: int
) -> Need:
    need = Need(
        weight_bytes=weight_bytes,
        kv_bytes=encoder_kv_bytes(model, config),
        max_model_len=encoder_len(model, config),
    )
    if need.num_bytes > memory_bytes:
        raise ParameterError(
            f"{name} needs {format_bytes(need.num_bytes)}, more than the "
            f"{format_bytes(memory_bytes)} for models: leave it out, or raise --model-memory"
        )
    return need


def _need(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    weight_bytes: int,
    share_bytes: int,
    memory_bytes: int,
) -> Need:
    available_bytes = weight_bytes + share_bytes
    try:
        kv = size_kv(model, config, weight_bytes=weight_bytes, available_bytes=available_bytes)
    except ParameterError as error:
        raise ParameterError(
            f"{name}, of whose weights there are {format_bytes(weight_bytes)}, does not fit into "
            f"the {format_bytes(memory_bytes)} for models: {error}; or raise --model-memory",
            param=error.param,
        ) from None
    return Need(
        weight_bytes=weight_bytes,
        kv_bytes=kv.num_bytes,
        max_model_len=kv.max_model_len,
        available_bytes=available_bytes,
    )
