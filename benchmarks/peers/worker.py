"""Runs one engine in a process of its own, under whichever Python has it.

    python worker.py MODULE MODEL '{"num_threads": 2, "context": 4096, ...}'

Reads a JSON request a line from stdin, writes a JSON answer a line to stdout. What the engine's
libraries print goes to stderr. Needs nothing but the standard library and the engine.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

FIRST_ID = 1000  # below lie control tokens and bytes


class StepEngine(Protocol):
    """What an adapter offers: greedy streams, advanced a step at a time."""

    num_ids: int

    def submit(self, stream: int, token_ids: Sequence[int]) -> None: ...

    def step(self) -> list[int]: ...

    def drop(self, streams: Iterable[int]) -> None: ...


def random_prompt(seed: int, num_tokens: int, num_ids: int) -> list[int]:
    """Return the same random tokens to every engine that is asked with the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, min(num_ids, 40000)) for _ in range(num_tokens)]


class Bench:
    """Measures one engine. Streams are numbered on and never reused."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._live: list[int] = []
        self._num_streams = 0
        self.prefill(seed=0, num_prompt=64)  # threads start, buffers are touched

    def prefill(self, *, seed: int, num_prompt: int) -> float:
        """Return the seconds from the arrival of a prompt to its first token."""
        self._drop()
        prompt = random_prompt(seed, num_prompt, self._engine.num_ids)
        start = time.perf_counter()
        self._submit(prompt)
        while not self._engine.step():
            pass
        return time.perf_counter() - start

    def decode(
        self, *, seed: int, num_prompt: int, num_streams: int, num_tokens: int, keep: bool
    ) -> float:
        """Return the seconds in which each stream gets `num_tokens` tokens, one step untimed.

        With `keep` the streams of the last call go on, where there are any.
        """
        if not (keep and len(self._live) == num_streams):
            self._drop()
            for idx in range(num_streams):
                self._submit(random_prompt(seed + idx, num_prompt, self._engine.num_ids))
            self._advance(1)
        self._advance(1)
        start = time.perf_counter()
        self._advance(num_tokens)
        return time.perf_counter() - start

    def _submit(self, prompt: list[int]) -> None:
        self._num_streams += 1
        self._live.append(self._num_streams)
        self._engine.submit(self._num_streams, prompt)

    def _advance(self, num_tokens: int) -> None:
        """Step until every stream has got `num_tokens` more."""
        missing = dict.fromkeys(self._live, num_tokens)
        while missing:
            for stream in self._engine.step():
                if stream in missing:
                    missing[stream] -= 1
                    if missing[stream] == 0:
                        del missing[stream]

    def _drop(self) -> None:
        self._engine.drop(self._live)
        self._live = []


def load_engine(module: str, model: str, options: dict[str, Any]) -> StepEngine:
    engine: StepEngine = importlib.import_module(module).Engine(model, **options)
    return engine


def main() -> None:
    module, model, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    try:
        bench = Bench(load_engine(module, model, json.loads(options)))
        answer(seconds=0.0)
        for line in sys.stdin:
            request = json.loads(line)
            answer(seconds=getattr(bench, request.pop("op"))(**request))
    except Exception as error:  # told to the parent, which goes on with the other engines
        answer(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
