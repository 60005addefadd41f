"""A cell of all engines: each at its best configuration, in turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cells import Cell, trial
from engines import EngineSpec, Options
from figures import Outcome, Sample
from measure import Session, measure, open_process, try_out
from processes import EngineError, EngineProcess

from paceline.engine.memory import available_memory
from paceline.measure.ceilings import Ceilings, measure_ceilings
from paceline.measure.floors import ModelCosts, decode_work, floor_s, prefill_work
from paceline.measure.machine import read_busy_cores

_SWITCH_GAIN = 0.02  # a configuration must be better by more than the noise to be taken
_MEMORY_SHARE = 0.8  # of what is free: engines that need more in all are loaded in turn


@dataclass(slots=True, kw_only=True)
class Bench:
    """All that the cells of one model share."""

    session: Session
    costs: ModelCosts
    num_parameters: int
    ceilings: list[Ceilings] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # cores that others kept busy, a round each
    scores: dict[object, float] = field(default_factory=dict)  # of the configurations tried


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def choose(options: Options, score: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """Return the best configuration, one option varied after the other from their first values.

    A configuration whose score raises EngineError is left out; if all do, so does this.
    """
    config = {name: values[0] for name, values in options.items()}
    changes = [{name: value} for name, values in options.items() for value in values[1:]]
    if not changes:
        return config
    best: float | None = None
    failure: EngineError | None = None
    for change in ({}, *changes):
        candidate = config | change
        try:
            found = score(candidate)
        except EngineError as error:
            failure = error
            continue
        if best is None or found > best + _SWITCH_GAIN * abs(best):
            config, best = candidate, found
    if best is None and failure is not None:
        raise failure
    return config


def fit_together(needs: Sequence[float], available_bytes: float) -> bool:
    """Return whether engines that need so many bytes may be loaded at the same time."""
    return sum(needs) <= _MEMORY_SHARE * available_bytes


@dataclass(slots=True, kw_only=True)
class Contender:
    """One engine in one cell. Once it has failed it takes no more turns; its outcome says why."""

    bench: Bench
    spec: EngineSpec
    cell: Cell
    outcome: Outcome = field(default_factory=Outcome)
    process: EngineProcess | None = None

    def configure(self) -> None:
        if self.cell.kind in self.spec.kinds:
            self._attempt(self._configure)
        else:
            self.outcome.note = "has no server"

    def open(self) -> None:
        """Load the engine and leave it stopped."""
        self._attempt(self._open)

    def take_turn(self, round_idx: int, ceilings: Ceilings | None) -> None:
        """Measure once. An engine that is not loaded is loaded for this turn only."""
        self._attempt(lambda: self._take_turn(round_idx, ceilings))

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None

    def memory_bytes(self) -> float:
        """Return an estimate of what the loaded engine takes, its KV cache included."""
        costs = self.bench.costs
        num_tokens = self.cell.context(self.bench.session.rounds) * self.cell.num_streams
        kv_bytes = num_tokens * sum(layer.key_bytes for layer in costs.attention)
        return kv_bytes + self.spec.memory_bytes(costs.weight_bytes, self.bench.num_parameters)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.outcome.note:
            return
        try:
            action()
        except EngineError as error:
            self.close()
            self.outcome.note = str(error)
            progress(f"    {self.spec.name}: {error}")

    def _configure(self) -> None:
        options = self.spec.options_for(self.cell)
        if self.bench.session.is_quick:
            options = {name: values[:1] for name, values in options.items()}
        self.outcome.config = choose(options, self._score)

    def _score(self, config: dict[str, Any]) -> float:
        short, scores = trial(self.cell), self.bench.scores
        key = (self.spec.name, short.kind, short.num_prompt, short.num_streams, *config.items())
        if key not in scores:
            scores[key] = try_out(self.bench.session, self.spec, short, config)
            progress(f"    {self.spec.name} {config}: {abs(scores[key]):.4g}")
        return scores[key]

    def _open(self) -> None:
        session, config = self.bench.session, self.outcome.config
        self.process = open_process(session, self.spec, self.cell, config)
        if self.process is not None:
            self.process.pause()

    def _take_turn(self, round_idx: int, ceilings: Ceilings | None) -> None:
        if is_visit := self.process is None:
            self._open()
        session, config = self.bench.session, self.outcome.config
        try:
            if self.process is not None:
                self.process.resume()
            values, seconds = measure(
                session, self.spec, self.cell, config, self.process, round_idx=round_idx
            )
            if self.process is not None:
                self.process.pause()
        finally:
            if is_visit:
                self.close()
        share = None
        if ceilings is not None and seconds is not None:
            num_before = 0 if is_visit else round_idx
            least_s = cell_floor_s(self.bench.costs, self.cell, ceilings, num_before=num_before)
            share = least_s / seconds
        self.outcome.samples.append(Sample(values=values, share=share))
        progress(f"    {self.spec.name}: {_shown(self.cell, values, share)}")


def _shown(cell: Cell, values: Sequence[float], share: float | None) -> str:
    parts = [
        f"{value:.4g} {figure.unit}" for value, figure in zip(values, cell.figures, strict=True)
    ]
    return ", ".join(parts if share is None else [*parts, f"{share:.0%} of floor"])


def cell_floor_s(costs: ModelCosts, cell: Cell, ceilings: Ceilings, *, num_before: int) -> float:
    """Return the floor of a prefill, or of one decode step after `num_before` kept rounds."""
    if cell.kind == "prefill":
        return floor_s(prefill_work(costs, cell.num_prompt), ceilings)
    context = round(cell.mean_context(num_before))
    work = decode_work(costs, num_streams=cell.num_streams, context=context)
    return floor_s(work, ceilings)


def run_cell(bench: Bench, cell: Cell, specs: Sequence[EngineSpec]) -> Mapping[str, Outcome]:
    """Return what each engine did in `bench.session.rounds` rounds of turns.

    Every round begins with how quiet the machine is and what its ceilings are; who comes first
    rotates.
    """
    contenders = [Contender(bench=bench, spec=spec, cell=cell) for spec in specs]
    for contender in contenders:
        contender.configure()
    try:
        if fit_together([c.memory_bytes() for c in contenders], available_memory()):
            for contender in contenders:
                contender.open()
        for round_idx in range(bench.session.rounds):
            bench.busy.append(read_busy_cores())
            ceilings = _read_ceilings(bench, cell)
            first = round_idx % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                contender.take_turn(round_idx, ceilings)
    finally:
        for contender in contenders:
            contender.close()
    return {contender.spec.name: contender.outcome for contender in contenders}


def _read_ceilings(bench: Bench, cell: Cell) -> Ceilings | None:
    """Return the ceilings now, where the cell has a floor."""
    if cell.kind not in ("prefill", "decode"):
        return None
    ceilings = measure_ceilings(bench.session.num_threads)
    bench.ceilings.append(ceilings)
    return ceilings
