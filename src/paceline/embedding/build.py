"""From a model's name to what embeds texts with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.embedding.embedder import Embedder, Shape
from paceline.embedding.pooling import Pooling, choose_pooling
from paceline.engine.build import display_name, new_backend
from paceline.engine.memory import kv_token_bytes
from paceline.errors import ParameterError, PromptTooLongError
from paceline.models.base import ModelConfig, build_plan
from paceline.plan.plan import Plan, sole_output
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.tensor import FLOAT_FORMATS

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel
    from paceline.engine.turns import Turns
    from paceline.text.tokenizer import Tokenizer
    from paceline.weights.tensor import QTensor

logger = logging.getLogger(__name__)

WEIGHTS = ("file", "q8_0")  # as they lie in the file, or rounded to int8 as they are loaded
# What an encoder has no use for: no sequence outlives a step, and none is continued.
_UNUSED = (
    "max_num_seqs", "block_size", "kv_dtype", "kv_memory_bytes", "prefix_cache", "kv_tier",
    "policy", "speculate", "seed",
)  # fmt: skip


class EmbeddingModel(Struct, frozen=True, kw_only=True):
    """A model that embeds texts. `open` loads it, which may take a while and much memory."""

    name: str
    tokenizer: Tokenizer
    dim: int
    max_len: int
    pooling: Pooling
    open: Callable[[], Embedder]
    aliases: tuple[str, ...] = ()  # other names that it answers to

    def encode(self, text: str, *, param: str = "input") -> list[int]:
        """Return the token ids of a text. Raises ParameterError for one that cannot be embedded."""
        limit = self.max_len * self.tokenizer.max_token_chars
        if len(text) > limit:
            raise PromptTooLongError(
                f"{param} has {len(text)} characters, {self.name} reads {self.max_len} tokens, at "
                f"most {limit} characters: split the text",
                param="input",
            )
        ids = self.tokenizer.encode(text)
        self.check(ids, param=param)
        return ids

    def check(self, ids: list[int], *, param: str = "input") -> None:
        """Raise ParameterError for token ids that cannot be embedded."""
        if not ids:
            raise ParameterError(f"{param} is empty: send a text", param="input")
        if len(ids) > self.max_len:
            raise PromptTooLongError(
                f"{param} has {len(ids)} tokens, the limit of {self.name} is {self.max_len}: "
                "split the text",
                param="input",
            )


def is_encoder(path: Path) -> bool:
    """Say whether the model at `path` embeds texts and writes none. Only its header is read."""
    return path.is_dir() and not open_checkpoint(path).config.is_causal


def load_embedding_model(
    model: str, config: EngineConfig, *, path: Path, pooling: str | None, weights: str = "file"
) -> EmbeddingModel:
    """Return a loaded model: an encoder, or a chat model of whose hidden states vectors are made.

    Raises ParameterError for options that embedding has no use for.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.config.is_causal:
        refuse_unused(config)
    max_len = config.max_model_len or checkpoint.config.max_context
    return _loaded(model, config, checkpoint, max_len=max_len, pooling=pooling, weights=weights)


def load_encoder_beside(
    model: str, config: EngineConfig, *, path: Path, pooling: str | None, weights: str, turns: Turns
) -> EmbeddingModel:
    """Return a loaded encoder that shares the cores with models that write, in `turns`.

    Of `config`, which is theirs, it takes what it has a use for. It reads no more than it has
    positions, whatever --max-model-len says.
    """
    checkpoint = open_checkpoint(path)
    return _loaded(
        model, config, checkpoint, max_len=encoder_len(checkpoint.config, config),
        pooling=pooling, weights=weights, turns=turns,
    )  # fmt: skip


def encoder_len(model: ModelConfig, config: EngineConfig) -> int:
    """Return the tokens of a text that an encoder beside other models reads."""
    return min(config.max_model_len or model.max_context, model.max_context)


def encoder_kv_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Return the size of the KV cache of an encoder beside other models: that of one step."""
    max_len = encoder_len(model, config)
    step_tokens = max(config.max_batched_tokens, max_len)
    shape = Shape(dim=0, max_len=max_len, step_tokens=step_tokens, is_causal=False)
    kv = shape.kv("f32")
    return kv.num_blocks * kv.block_size * kv_token_bytes(model, kv.dtype)


def _loaded(
    model: str,
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    max_len: int,
    pooling: str | None,
    weights: str,
    turns: Turns | None = None,
) -> EmbeddingModel:
    start = time.monotonic()
    chosen = choose_pooling(pooling, checkpoint.path, is_causal=checkpoint.config.is_causal)
    embedder = open_embedder(
        checkpoint, config, max_len=max_len, pooling=chosen, weights=weights, turns=turns
    )
    loaded = EmbeddingModel(
        name=display_name(model),
        tokenizer=build_tokenizer(checkpoint.tokenizer),
        dim=embedder.shape.dim,
        max_len=max_len,
        pooling=chosen,
        open=lambda: embedder,
    )
    logger.info(
        "%s: loaded in %.2f s, weights %s, vectors of %d by %s pooling, texts of up to %d tokens",
        loaded.name, time.monotonic() - start, weights, loaded.dim, chosen, max_len,
    )  # fmt: skip
    return loaded


def embeddings_of(
    loaded: LoadedModel, pooling: str | None, *, turns: Turns | None = None
) -> EmbeddingModel:
    """Return what embeds with a chat model; it opens a backend of its own, over the same weights.

    Its KV cache holds one text, and its memory is taken when the first text comes. `turns` are
    those of the engines that it shares the cores with.
    """
    chosen = choose_pooling(pooling, loaded.path, is_causal=True)
    max_len = loaded.engine.max_model_len
    return EmbeddingModel(
        name=loaded.name,
        tokenizer=loaded.tokenizer,
        dim=loaded.checkpoint.config.hidden_size,
        max_len=max_len,
        pooling=chosen,
        aliases=loaded.aliases,
        open=lambda: open_embedder(
            loaded.checkpoint, loaded.config, max_len=max_len, pooling=chosen, turns=turns
        ),
    )


def open_embedder(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    max_len: int,
    pooling: Pooling,
    weights: str = "file",
    turns: Turns | None = None,
) -> Embedder:
    """Return an embedder with a backend of its own. `weights` is one of WEIGHTS."""
    model = checkpoint.config
    if max_len > model.max_context:
        raise ParameterError(
            f"max_model_len is {max_len}, the model's context is {model.max_context} tokens: "
            "lower --max-model-len",
            param="max_model_len",
        )
    plan = hidden_plan(build_plan(model))
    shape = Shape(
        dim=sole_output(plan).cols,
        max_len=max_len,
        step_tokens=max(config.max_batched_tokens, 1 if model.is_causal else max_len),
        is_causal=model.is_causal,
    )
    tensors = checkpoint.tensors
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    if weights != "file":
        tensors, num_bytes = _rounded(plan, tensors, weights), 0  # 0: the cache file is the file's
    backend, _ = new_backend(checkpoint.path, config, num_bytes)
    kv = shape.kv(config.kv_dtype if model.is_causal else "f32")
    backend.load(plan, tensors, kv=kv, limits=shape.limits())
    return Embedder(backend, shape, pooling, turns)


def hidden_plan(plan: Plan) -> Plan:
    """Return the plan up to what its head reads: a decoder's normed hidden states.

    An encoder's plan, which hands out hidden states, stays as it is.
    """
    if "logits" not in plan.outputs:
        return plan
    producer = {op.out.id: op for op in plan.ops}
    head = producer[plan.outputs["logits"].id]
    dropped = {head.out.id}
    while head.name != "linear":
        head = producer[head.inputs[0].id]
        dropped.add(head.out.id)
    ops = [op for op in plan.ops if op.out.id not in dropped]
    return plan.derive(ops, {"hidden": head.inputs[0]})


def _rounded(plan: Plan, tensors: Mapping[str, QTensor], weights: str) -> Mapping[str, QTensor]:
    """Return `tensors` with those of linears in the format `weights`."""
    from paceline.weights.quantize import with_q8_0

    if weights not in WEIGHTS:
        raise ParameterError(
            f"weights is {weights!r}: choose one of {', '.join(WEIGHTS)}", param="weights"
        )
    linears = [op.weights[0] for op in plan.ops if op.name == "linear"]
    quantized = {tensors[name].format for name in linears} - FLOAT_FORMATS
    if quantized:
        raise ParameterError(
            f"weights is {weights!r}, but this model's are quantised already "
            f"({', '.join(sorted(quantized))}): leave it out",
            param="weights",
        )
    return with_q8_0(tensors, linears)


def refuse_unused(config: EngineConfig) -> None:
    """Raise ParameterError naming an option that only writing text has a use for."""
    default = EngineConfig()
    for name in _UNUSED:
        if getattr(config, name) != getattr(default, name):
            raise ParameterError(
                f"{name} is {getattr(config, name)!r}, but this model embeds texts and has no use "
                "for it: leave it out",
                param=name,
            )
