"""Engines on a scripted backend, and what came out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.backends.base import StepInput
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.recorder import Recorder
from paceline.engine.speculation.base import Pace, Proposer
from paceline.engine.turns import Turns
from paceline.types import Delta, Request, SamplingParams, TokenLogprob
from tests.unit.piece_tokenizer import PieceTokenizer
from tests.unit.scripted_backend import Script, ScriptedBackend, hashed_script

BLOCK_SIZE = 16
VOCAB = 48
LETTERS = PieceTokenizer([chr(97 + i % 26) for i in range(VOCAB)])


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


def make_engine(
    script: Script | None = None,
    *,
    num_blocks: int = 64,
    max_model_len: int = 512,
    tokenizer: PieceTokenizer = LETTERS,
    eos_ids: tuple[int, ...] = (0,),
    on_forward: Callable[[StepInput], None] | None = None,
    clock: Clock | None = None,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    policy: str = "fcfs",
    seed: int = 0,
    recorder: Recorder | None = None,
    prefix_cache: bool = False,
    kv_tier: str | None = None,
    proposer: Proposer | None = None,
    pace: Pace | None = None,
    turns: Turns | None = None,
) -> Engine:
    """Return an engine without a prefix cache, or else tests would share more than they say."""
    config = EngineConfig(
        speculate="off" if proposer is None else "ngram",
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        policy=policy,
        seed=seed,
        prefix_cache=prefix_cache,
        kv_tier=kv_tier,
    )
    vocab_size = tokenizer.vocab_size
    backend = ScriptedBackend(
        script or hashed_script(vocab_size),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        on_forward=on_forward,
    )
    return Engine(
        backend=backend,
        tokenizer=tokenizer,
        config=config,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        recorder=recorder,
        proposer=proposer,
        pace=pace,
        clock=clock or Clock(),
        turns=turns,
    )


def make_request(
    request_id: str = "a",
    prompt: tuple[int, ...] = (1, 2, 3),
    params: SamplingParams | None = None,
    *,
    priority: int = 0,
    cache_salt: str = "",
    tenant: str = "",
    pin: str = "",
) -> Request:
    params = params or SamplingParams(temperature=0, max_tokens=8)
    return Request(
        id=request_id,
        prompt_token_ids=prompt,
        params=params,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
        pin=pin,
    )


@dataclass(slots=True)
class Answer:
    """All that one choice was told."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    deltas: list[Delta] = field(default_factory=list)

    @property
    def end(self) -> Delta:
        return self.deltas[-1]

    @property
    def is_finished(self) -> bool:
        return bool(self.deltas) and self.end.finish_reason is not None

    def outcome(self) -> tuple[object, ...]:
        """Return all that must not depend on what else runs, or has run."""
        usage = self.end.usage
        assert usage is not None
        return (
            self.text,
            self.token_ids,
            self.logprobs,
            self.end.finish_reason,
            self.end.stop_reason,
            (usage.prompt_tokens, usage.completion_tokens),
        )


class Answers(dict[tuple[str, int], Answer]):
    """A sink: (request id, index) -> Answer. Refuses news of a choice that has ended."""

    def __call__(self, delta: Delta) -> None:
        answer = self.setdefault((delta.request_id, delta.index), Answer())
        assert not answer.is_finished
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs
        answer.deltas.append(delta)


def run(engine: Engine, *requests: Request) -> Answers:
    """Submit all, step until nothing is left, and check the books after every step."""
    answers = Answers()
    for request in requests:
        engine.submit(request, answers)
    finish(engine)
    return answers


def finish(engine: Engine, max_steps: int = 5000) -> None:
    for _ in range(max_steps):
        did_run = engine.step()
        engine.check_integrity()
        stats = engine.stats()
        if not did_run:
            assert not stats.num_waiting
            assert stats.num_live_blocks * BLOCK_SIZE == engine.weigh_pin((), "", engine.pins())[0]
            return
    raise AssertionError("the engine does not come to an end")
