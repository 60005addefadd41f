"""From the name of a draft model to a proposer that runs it, within its share of the memory."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from paceline.backends.base import KVSpec, StepLimits
from paceline.config import EngineConfig
from paceline.engine.block_pool import BlockPool
from paceline.engine.memory import KVSize, format_bytes, kv_token_bytes
from paceline.engine.sampler import Sampler
from paceline.engine.speculation.base import MAX_DRAFTED
from paceline.engine.speculation.draft_model import DraftModel
from paceline.engine.speculation.load import Speculation
from paceline.engine.speculation.shadows import Shadows
from paceline.engine.speculation.translation import SameTokens, translation
from paceline.engine.step import StepBuilder
from paceline.errors import ParameterError, UnsupportedModelError
from paceline.models.base import build_plan
from paceline.plan.passes import shorten_head
from paceline.text.tokenizer import build_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_KV_SHARE = 0.125  # of the KV memory: a draft model is small, and reads a window of each text
_MIN_BLOCKS = 4
_WARM_UP = (1, 2, 8, 64)  # tokens of the steps that tell what a guess and a set-up will cost


class DraftWeights(Struct, frozen=True, kw_only=True):
    """A draft model that is opened: what it needs is known, and nothing is loaded."""

    speculation: Speculation
    checkpoint: Checkpoint
    config: EngineConfig
    weight_bytes: int

    def split(self, kv: KVSize) -> tuple[KVSize, int]:
        """Return the KV pool of the large model beside this one's, and the blocks of this one's."""
        size = self.config.block_size
        block_bytes = kv_token_bytes(self.checkpoint.config, self.config.kv_dtype) * size
        longest = min(kv.max_model_len, self.checkpoint.config.max_context)
        most = self.config.max_num_seqs * -(-longest // size)
        num_blocks = min(int(kv.num_bytes * _KV_SHARE) // block_bytes, most)
        num_left = (kv.num_bytes - num_blocks * block_bytes) // kv.block_bytes
        if num_blocks < _MIN_BLOCKS or num_left < 1:
            need = int(_MIN_BLOCKS * block_bytes / _KV_SHARE)
            raise ParameterError(
                f"the KV cache may take {format_bytes(kv.num_bytes)}, of which the draft model "
                f"gets {_KV_SHARE:.1%}: raise --kv-memory to {format_bytes(need)} or more",
                param="kv_memory_bytes",
            )
        left = replace(
            kv, num_blocks=num_left, max_model_len=min(kv.max_model_len, num_left * size)
        )
        return left, num_blocks

    def load(self, num_blocks: int, tokenizer: Tokenizer) -> DraftModel:
        """Return the proposer, for sequences in the tokens of `tokenizer`."""
        from paceline.engine.build import new_backend

        config, model = self.config, self.checkpoint.config
        backend, _ = new_backend(self.checkpoint.path, config, self.weight_bytes)
        size = config.block_size
        max_len = min(model.max_context, num_blocks * size)
        max_seqs = min(config.max_num_seqs, MAX_DRAFTED, config.max_batched_tokens)
        limits = StepLimits(
            max_tokens=config.max_batched_tokens,
            max_logit_rows=max_seqs,
            max_seqs=max_seqs,
            max_blocks_per_seq=-(-max_len // size),
        )
        own_tokenizer = build_tokenizer(self.checkpoint.tokenizer)
        num_ids = self.num_ids(own_tokenizer)
        backend.load(
            shorten_head(build_plan(model), num_ids),
            self.checkpoint.tensors,
            kv=KVSpec(num_blocks=num_blocks, block_size=size, dtype=config.kv_dtype),
            limits=limits,
        )
        shadows = Shadows(
            backend,
            pool=BlockPool(num_blocks),
            builder=StepBuilder(limits, size),
            block_size=size,
            max_tokens=limits.max_tokens,
            clock_s=time.perf_counter,
        )
        shadows.warm_up([n for n in _WARM_UP if n <= min(limits.max_tokens, max_len)])
        words = translation(tokenizer, own_tokenizer)
        logger.info(
            "drafts by %s: weights %s, %d of %d tokens, KV cache %s, %s tokenizer",
            self.speculation.model, format_bytes(self.weight_bytes), num_ids, model.vocab_size,
            format_bytes(num_blocks * size * kv_token_bytes(model, config.kv_dtype)),
            "the same" if isinstance(words, SameTokens) else "another",
        )  # fmt: skip
        return DraftModel(
            shadows,
            words,
            Sampler(num_ids, (), own_tokenizer),
            eos_ids=frozenset(self.checkpoint.generation.eos_ids),
            max_tokens=self.speculation.max_tokens,
            window=self.speculation.window,
            max_len=max_len,
        )

    def num_ids(self, tokenizer: Tokenizer) -> int:
        """Return how many ids the draft model may guess, the first ones.

        Tokenizers number their tokens by merge or by score, the frequent ones first, and the head
        is a large part of a small model's bytes (FR-Spec, Zhao 2025, which counts tokens in a
        text). Rows beyond the tokenizer are padding.
        """
        num_ids = min(self.checkpoint.config.vocab_size, tokenizer.vocab_size)
        return min(num_ids, self.speculation.num_vocab or num_ids)


def open_weights(speculation: Speculation, config: EngineConfig) -> DraftWeights:
    """Return the draft model that `speculation` names; it is pulled if need be."""
    from paceline.catalog import resolve

    checkpoint = open_checkpoint(resolve(speculation.model))
    if not checkpoint.config.is_causal:
        raise UnsupportedModelError(
            f"{speculation.model} embeds texts and writes none: name another model after "
            "--speculate draft:model="
        )
    return DraftWeights(
        speculation=speculation,
        checkpoint=checkpoint,
        config=config,
        weight_bytes=sum(tensor.num_bytes for tensor in checkpoint.tensors.values()),
    )
