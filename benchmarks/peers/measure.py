"""One measurement of one engine in one cell."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import load
from cells import Cell
from engines import HERE, EngineSpec
from processes import EngineError, EngineProcess, Server, Worker, first_output_s, free_port

from paceline.engine.build import display_name
from paceline.text.tokenizer import Tokenizer

# Common words: their tokens make text, of which the server sends each token as soon as it is there.
_TEXT = (
    "the river runs past old stone houses where people once sold bread and cloth while children "
    "played near small boats under bright summer light before winter came with snow over quiet "
    "fields and every road led slowly back to town through green hills full of sheep and birds"
)
_WORDS = tuple(_TEXT.split())
_NUM_TRIAL = 8  # requests by which server configurations are compared
_NUM_ALONE = 3  # requests that tell whether the limits can be met at all
_SETTLED = 1.2  # factor by which later rounds widen their search from the rate before
_BESIDE_PROMPT = 32  # tokens of each stream that decodes when the long prompt arrives
_BESIDE_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A model under test, and how its engines are run."""

    path: Path
    max_context: int
    tokenizer: Tokenizer
    num_threads: int
    rounds: int
    is_quick: bool
    pythons: Mapping[str, str]  # by engine
    copies: Mapping[str, str]  # another file of the same model, by engine
    rates: dict[str, float] = field(default_factory=dict)  # the last one found, by engine

    def model_for(self, spec: EngineSpec) -> str:
        return self.copies.get(spec.name, str(self.path))

    def words(self, rng: random.Random, num_tokens: int) -> list[int]:
        """Return a prompt of `num_tokens` tokens that no other call returns."""
        text = " ".join(rng.choice(_WORDS) for _ in range(num_tokens))
        return self.tokenizer.encode(text, add_special=False)[:num_tokens]


def seed_of(cell: Cell, round_idx: int) -> int:
    """Return a seed that differs between cells and rounds, far from those of their streams."""
    return zlib.crc32(f"{cell.name}:{round_idx}".encode()) * 1000


def open_process(
    session: Session, spec: EngineSpec, cell: Cell, config: Mapping[str, Any]
) -> EngineProcess | None:
    """Return the loaded engine that `measure` asks; None for a cell that starts its own.

    Raises EngineError where the engine cannot load the model.
    """
    if cell.kind == "start":
        return None
    python = session.pythons[spec.name]
    context = max(cell.context(session.rounds), 128)
    if cell.kind == "burst":
        context = max(context, _BESIDE_PROMPT + _BESIDE_TOKENS)
    num_streams = cell.num_streams + (cell.kind == "burst")
    options = _worker_options(session, config, context=context, num_streams=num_streams)
    model = session.model_for(spec)
    if cell.kind in ("prefill", "decode"):
        return Worker(python, spec.module, model, options)
    port = free_port()
    if spec.module == "engine_paceline":
        command = _serve_command(session, python, options | {"port": port})
    else:
        script = str(HERE / "serve_steps.py")
        command = [python, script, spec.module, model, str(port), json.dumps(options)]
    return Server(command, port)


def measure(
    session: Session,
    spec: EngineSpec,
    cell: Cell,
    config: Mapping[str, Any],
    process: EngineProcess | None,
    *,
    round_idx: int,
) -> tuple[tuple[float, ...], float | None]:
    """Return (a value per figure of the cell, seconds to hold against the floor)."""
    seed = seed_of(cell, round_idx)
    if isinstance(process, Worker):
        return _measure_worker(cell, process, seed)
    if isinstance(process, Server):
        client = load.Client(process.port, display_name(str(session.path)))
        rng = random.Random(seed)
        try:
            if cell.kind == "burst":
                return _measure_burst(session, cell, client, rng), None
            return (_measure_rate(session, spec, cell, client, seed),), None
        except (OSError, RuntimeError) as error:
            raise EngineError(str(error)) from None
    return (first_output_s(_start_command(session, spec, config)),), None


def try_out(session: Session, spec: EngineSpec, cell: Cell, config: Mapping[str, Any]) -> float:
    """Return how good `config` is at the short form `cell`: higher is better."""
    process = open_process(session, spec, cell, config)
    if process is None:
        return -min(first_output_s(_start_command(session, spec, config)) for _ in range(2))
    with process:
        if isinstance(process, Server) and cell.kind == "server":
            client = load.Client(process.port, display_name(str(session.path)))
            rng = random.Random(seed_of(cell, -1))
            prompts = [session.words(rng, cell.num_prompt) for _ in range(_NUM_TRIAL)]
            return load.throughput(client, prompts, cell.num_tokens)
        figure = cell.figures[0]
        values = [
            measure(session, spec, cell, config, process, round_idx=-1 - i)[0][0]
            for i in range(1 if cell.kind == "burst" else 2)
        ]
        return max(values) if figure.is_rate else -min(values)


def _measure_worker(
    cell: Cell, worker: Worker, seed: int
) -> tuple[tuple[float, ...], float | None]:
    if cell.kind == "prefill":
        seconds = worker.call("prefill", seed=seed, num_prompt=cell.num_prompt)
        return (cell.num_prompt / seconds,), seconds
    seconds = worker.call(
        "decode", seed=seed, num_prompt=cell.num_prompt, num_streams=cell.num_streams,
        num_tokens=cell.num_tokens, keep=cell.keeps_streams,
    )  # fmt: skip
    step_s = seconds / cell.num_tokens
    return (cell.num_streams / step_s,), step_s


def _measure_burst(
    session: Session, cell: Cell, client: load.Client, rng: random.Random
) -> tuple[float, float]:
    streams = [session.words(rng, _BESIDE_PROMPT) for _ in range(cell.num_streams)]
    gap_s, ttft_s = load.long_prompt_beside(client, streams, session.words(rng, cell.num_prompt))
    return gap_s * 1e3, ttft_s


def _measure_rate(
    session: Session, spec: EngineSpec, cell: Cell, client: load.Client, seed: int
) -> float:
    """Return the highest rate within the limits; 0 where one request alone misses them."""
    trials: Iterator[int] = count()

    def prompts(num: int) -> list[list[int]]:
        rng = random.Random(seed + next(trials))
        return [session.words(rng, cell.num_prompt) for _ in range(num)]

    if load.ttft_alone(client, prompts(_NUM_ALONE), cell.num_tokens) > load.TTFT_LIMIT_S:
        return 0.0

    def passes(rate: float) -> bool:
        num = 8 if session.is_quick else max(20, int(30 * rate))
        return load.passes_at(client, rate, prompts(num), num_tokens=cell.num_tokens, seed=seed)

    last = session.rates.get(spec.name)
    rate = load.highest_rate(passes, start=last or 1.0, factor=_SETTLED if last else 2.0)
    session.rates[spec.name] = rate
    return rate


def _worker_options(
    session: Session, config: Mapping[str, Any], *, context: int, num_streams: int
) -> dict[str, Any]:
    own = {"num_threads": session.num_threads, "context": context, "num_streams": num_streams}
    return own | {name: value for name, value in config.items() if value is not None}


def _serve_command(session: Session, python: str, options: Mapping[str, Any]) -> list[str]:
    flags = {"num_threads": "threads", "context": "max-model-len", "num_streams": "max-num-seqs"}
    command = [python, "-m", "paceline", "serve", str(session.path)]
    for name, value in options.items():
        command += [f"--{flags.get(name, name.replace('_', '-'))}", str(value)]
    return command


def _start_command(session: Session, spec: EngineSpec, config: Mapping[str, Any]) -> list[str]:
    python, model = session.pythons[spec.name], session.model_for(spec)
    if spec.module == "engine_paceline":
        threads = str(session.num_threads)
        return [python, "-m", "paceline", "run", model, "Hi", "-n", "1", "--threads", threads]
    options = _worker_options(session, config, context=256, num_streams=1)
    return [python, str(HERE / "first_token.py"), spec.module, model, json.dumps(options)]
