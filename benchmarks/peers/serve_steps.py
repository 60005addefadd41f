"""An HTTP server over an engine's steps, for peers whose package has none that batches.

    python serve_steps.py MODULE MODEL PORT '{"num_threads": 2, "context": 512, ...}'

It is the one of `paceline bench --peer`, with what `load.py` asks of it: token ids in, an event a
token out, without its text, which spares the engine the work of decoding it. Needs only the
standard library and the engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[2] / "src"))  # in whichever Python has the engine

from worker import StepEngine, load_engine

from paceline.bench.adapters.shell import Piece, serve


class Steps:
    """A StepEngine as the server drives it. A token's text is "-"."""

    def __init__(self, engine: StepEngine, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.num_slots: int = options["num_streams"]
        self.context: int = options["context"]
        self._engine = engine
        self._num_left: dict[int, int] = {}

    def encode(self, messages: list[dict[str, Any]] | None, prompt: Any) -> list[int]:
        if not isinstance(prompt, list):
            raise ValueError("prompts are lists of token ids here")
        return prompt

    def submit(self, stream: int, ids: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self._num_left[stream] = max_tokens
        self._engine.submit(stream, ids)

    def step(self) -> Iterable[Piece]:
        pieces = []
        for stream in self._engine.step():
            self._num_left[stream] -= 1
            left = self._num_left[stream]
            if left >= 0:  # a step may bring more than the last token
                pieces.append(Piece(stream, "-", 1, None if left else "length"))
        return pieces

    def drop(self, stream: int) -> None:
        self._engine.drop([stream])
        del self._num_left[stream]


def main() -> None:
    module, model, port, text = sys.argv[1:]
    options: dict[str, Any] = json.loads(text)
    serve(Steps(load_engine(module, model, options), Path(model).stem, options), int(port))


if __name__ == "__main__":
    main()
