"""Facts: what is known of a run. Everything that an explanation says is derived from them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

Parts = dict[str, float]  # milliseconds by part of the ledger
Some = Annotated[int, Meta(ge=1)]  # none of it would be no server


class CallFacts(Struct, frozen=True, kw_only=True):
    """One answered call. `first_parts` are those of the time to the first content."""

    wall_ms: float
    ttft_ms: float | None
    parts: Parts
    first_parts: Parts
    others_prefill_ms: float  # lost to the prompts of others, in all
    prompt_tokens: int
    completion_tokens: int  # of all choices
    num_choices: int = 1
    repeated_tokens: int = 0  # of the prompt, as an earlier one began
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    unstepped_tokens: int = 0  # of the answer: guesses and forced ones, which had no step
    rejected_ms: float = 0.0  # of drafts that were wrong
    began_at: float = 0.0  # seconds; only differences count

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of the prompt that repeat a beginning and were not found in the prefix cache."""
        return max(self.repeated_tokens - self.cached_tokens, 0)

    @property
    def answer_tokens(self) -> float:
        """Tokens of a choice, on the mean."""
        return self.completion_tokens / self.num_choices

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token after the first content, as the reader of a choice gets them."""
        if self.ttft_ms is None or self.answer_tokens < 2:
            return None
        return (self.wall_ms - self.ttft_ms) / (self.answer_tokens - 1)


class StepFacts(Struct, frozen=True, kw_only=True):
    """One step of the engine."""

    num_tokens: int
    num_decode: int  # rows of sequences that decode, guesses among them
    num_seqs: int
    forward_s: float
    duration_s: float
    num_guesses: int = 0
    mean_keys: float | None = None  # that a token attends to in a layer; None: not known

    @property
    def num_prefill(self) -> int:
        """Tokens of prompts, and those that are computed again."""
        return self.num_tokens - self.num_decode


class ServerFacts(Struct, frozen=True, kw_only=True):
    """What a server was started with, and the machine under it."""

    model: str
    isa: str
    num_threads: Some
    machine_threads: Some  # that its CPU mask and quota allow
    max_num_seqs: Some
    max_batched_tokens: Some
    max_model_len: Some
    block_size: Some
    num_blocks: Some
    kv_dtype: str
    kv_token_bytes: Some
    weight_bytes: Some
    num_parameters: Some
    policy: str
    num_layers: int = 0  # 0: an older server does not tell
    prefix_cache: bool = True
    activations: str = "q8"
    speculate: str = "off"


class Facts(Struct, frozen=True, kw_only=True):
    """A run: its calls, and where it is known its steps and its server."""

    source: str
    calls: tuple[CallFacts, ...]
    steps: tuple[StepFacts, ...] = field(default_factory=tuple)
    server: ServerFacts | None = None
    num_failed: int = 0  # calls that were no answers
    # Of a summary that has no calls: by percentile, a call of which each figure is at its own.
    percentiles: dict[int, CallFacts] = field(default_factory=dict)
    num_summed: int = 0  # calls behind the percentiles

    @property
    def num_calls(self) -> int:
        return self.num_summed or len(self.calls)
