"""What a request must satisfy before the engine takes it, and the books between two steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.engine.block_pool import BlockPool, EngineIntegrityError
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence, State
from paceline.errors import ParameterError, PromptTooLongError
from paceline.types import Request


def check_ids(ids: Iterable[int], *, param: str, num_ids: int) -> None:
    """Raise ParameterError naming the first id that is no integer in [0, num_ids)."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < num_ids:
            raise ParameterError(
                f"{param} holds the token id {token_id!r}: this model's ids are the integers 0 to "
                f"{num_ids - 1}",
                param=param,
            )


def check_grammar(request: Request) -> None:
    """Raise where the structure that is asked for would not be kept to."""
    if request.params.structured is not None and request.grammar is None:
        raise ParameterError(
            "structured is given, but no grammar: make it with LoadedModel.grammar",
            param="structured",
        )


def check_pin(request: Request, cache: PrefixCache | None) -> None:
    """Raise where a prompt that is to be pinned cannot be."""
    if not request.pin:
        return
    if cache is None:
        raise ParameterError(
            "there is no prefix cache to pin a prompt in: leave out --no-prefix-cache", param="pin"
        )
    cache.pins.check(*cache.weigh_pin(request.prompt_token_ids, request.cache_salt))


def check_length(request: Request, *, max_model_len: int, num_pool_tokens: int) -> None:
    """Raise unless prompt and one token more fit the context and the KV pool.

    A prompt that is only scored needs no room for another token. A longer answer than fits is no
    error: it ends with finish_reason "length".
    """
    num_prompt = len(request.prompt_token_ids)
    max_tokens = request.params.max_tokens
    asked = "any number" if max_tokens is None else str(max_tokens)
    num_more = 0 if max_tokens == 0 else 1
    if num_prompt == 0:
        raise ParameterError("the prompt is empty: give at least one token", param="prompt")
    if num_prompt + num_more > max_model_len:
        raise PromptTooLongError(
            f"the context is {max_model_len} tokens; the prompt has {num_prompt} and {asked} "
            f"more are requested: shorten the prompt to {max_model_len - num_more} or, if the "
            f"model's context is longer, raise --max-model-len or --kv-memory",
            param="prompt",
        )
    if num_prompt + num_more > num_pool_tokens:
        raise PromptTooLongError(
            f"the KV pool holds {num_pool_tokens} tokens; the prompt has {num_prompt} and {asked} "
            f"more are requested (the context is {max_model_len}): shorten the prompt to "
            f"{num_pool_tokens - num_more} or raise --kv-memory",
            param="prompt",
        )


def check_books(
    scheduler: Scheduler,
    pool: BlockPool,
    known: Collection[Sequence],
    *,
    block_size: int,
    max_num_seqs: int,
) -> None:
    """Raise EngineIntegrityError unless blocks, states and queues agree; `known` are unfinished."""
    running, waiting = scheduler.running, scheduler.waiting
    pins = [] if scheduler.cache is None else scheduler.cache.pins.tables()
    pool.check_integrity([*pins, *(seq.block_table for seq in running)])
    if scheduler.cache is not None:
        scheduler.cache.check_integrity(running)
    for seq in running:
        if seq.state is not State.RUNNING or len(seq.block_table) * block_size < seq.num_computed:
            raise EngineIntegrityError(f"running sequence {seq.number} lacks state or blocks")
        if (len(seq.block_table) - 1) * block_size >= len(seq.token_ids):
            raise EngineIntegrityError(f"running sequence {seq.number} holds blocks it needs not")
    for seq in waiting:
        if seq.state is not State.WAITING or seq.block_table or seq.num_computed:
            raise EngineIntegrityError(f"waiting sequence {seq.number} holds blocks")
    queued = [child for seq in (*running, *waiting) for child in (seq, *seq.siblings)]
    if {id(seq) for seq in known} != {id(seq) for seq in queued} or len(known) != len(queued):
        raise EngineIntegrityError(
            f"{len(known)} unfinished sequences, but {len(queued)} are running or waiting"
        )
    if len(running) > max_num_seqs:
        raise EngineIntegrityError(f"{len(running)} sequences run at once")
