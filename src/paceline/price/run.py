"""A price list from start to end: candidates made, read, asked and timed, each in its own process.

Whatever is measured goes into a state file at once: the same command goes on after a kill, and one
with more candidates measures only those.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from paceline import __version__
from paceline.catalog.store import home
from paceline.engine.build import display_name, embeds_only
from paceline.errors import OutputError, ParameterError, UnsupportedModelError
from paceline.evaluate.state import State
from paceline.measure.machine import this_machine
from paceline.price.candidates import Candidate, Weights, digest_of, disk_bytes, fingerprint
from paceline.price.children import run_command, run_speed
from paceline.price.speed import Spec
from paceline.quantize.recipe import new_recipe
from paceline.quantize.source import open_source
from paceline.weights.checkpoint import open_checkpoint

Show = Callable[[str, int, int], None]  # what, done, total
MODELS = "models"  # the folder of candidates that are made, within the work folder
REFERENCE_KV = "f32"
_PACKED = 2.1  # a model and its cache of packed weights, over the model
_SPARE_BYTES = 1 << 28  # of the disk that are left free
_PROBLEMS = "humaneval"


class Quality(Struct, frozen=True, kw_only=True):
    """What `paceline eval` is to read and to ask. No text: perplexity and KL are left out."""

    text: Path | None
    context: int = 512
    windows: int | None = None  # the first so many of the text
    activations: str = "f32"
    humaneval: bool = False
    problems: int | None = None  # the first so many
    humaneval_file: str | None = None
    max_tokens: int = 512


class Load(Struct, frozen=True, kw_only=True):
    """What speeds are measured at, and how often."""

    batches: tuple[int, ...] = (1, 8, 32)
    input_tokens: int = 256
    output_tokens: int = 64
    rounds: int = 3
    num_threads: int | None = None


class Job(Struct, frozen=True, kw_only=True):
    """One thing to measure: its key in the state, what it is called, and how it is found out."""

    key: str
    what: str
    run: Callable[[], dict[str, Any]]


class PriceList:
    """Candidates of one model and what is asked of them; `work` is the folder that holds all.

    None is a folder in PACELINE_HOME that belongs to this very work. Raises ParameterError where a
    candidate cannot be made, OutputError where the disk has no room.
    """

    def __init__(
        self, source: Path, candidates: Sequence[Candidate], *, quality: Quality, load: Load,
        calibrate: Path | None, work: Path | None,
    ) -> None:  # fmt: skip
        self.source = source
        self.candidates = candidates
        self.quality = quality
        self.load = load
        self._calibrate = calibrate
        self.is_kept = work is not None
        self._refuse_encoders()
        self._prints = {w.name: self._fingerprint(w) for w in self._weights()}
        self.identity = self._identity()
        digest = digest_of(repr(sorted(self.identity.items())))
        self.work = work or home() / "prices" / digest
        self.state_path = self.work / f"price-{digest}.jsonl"

    def path_of(self, weights: Weights) -> Path:
        """Return where the weights lie, or will."""
        if weights.path is not None:
            return weights.path
        slug = weights.name.replace("/", "-").replace(":", "-")
        return self.work / MODELS / f"{slug}-{self._prints[weights.name]}"

    def run(self, state: State, show: Show) -> dict[str, Any]:
        """Return everything that was measured, by candidate; see `_measured`."""
        missing = [w for w in self._weights() if not self.path_of(w).exists()]
        self._check_room(missing)
        jobs = [*self._quality_jobs(), *self._speed_jobs()]
        waiting = [job for job in jobs if job.key not in state]
        total = len(missing) + len(jobs)
        done = len(jobs) - len(waiting)
        for weights in missing:
            show(f"making {weights.name}", done, total)
            self._make(weights)
            done += 1
        for job in waiting:
            show(job.what, done, total)
            state.put(job.key, job.run())
            done += 1
        return {candidate.name: self._measured(candidate, state) for candidate in self.candidates}

    def _measured(self, candidate: Candidate, state: State) -> dict[str, Any]:
        return {
            "path": str(self.path_of(candidate.weights)) if self.is_kept else None,
            "disk_bytes": disk_bytes(self.path_of(candidate.weights)),
            "text": self._known(state, "text", candidate),
            "humaneval": self._known(state, _PROBLEMS, candidate),
            "rounds": [
                state[self._key(f"speed {idx}", candidate)] for idx in range(self.load.rounds)
            ],
        }  # fmt: skip

    def _known(self, state: State, what: str, candidate: Candidate) -> dict[str, Any] | None:
        key = self._key(what, candidate)
        if key not in state:
            return None
        found: dict[str, Any] = state[key]
        return found

    def _identity(self) -> dict[str, Any]:
        """Return all that the figures depend on, beside the candidates themselves."""
        quality = msgspec.structs.replace(self.quality, text=None)  # its content counts
        asked = quality, msgspec.structs.replace(self.load, rounds=1)
        problems = self.quality.humaneval_file
        return {
            "version": __version__,
            "source": fingerprint(self.source),
            "machine": msgspec.to_builtins(this_machine()),
            "asked": msgspec.json.encode(asked).decode(),
            "text": _content(self.quality.text),
            "problems": _content(None if problems is None else Path(problems)),
        }

    # ---- candidates ----

    def _refuse_encoders(self) -> None:
        """Open what is there already: a model that cannot be priced is told before others are."""
        for path in {self.source, *(w.path for w in self._weights() if w.path is not None)}:
            if not open_checkpoint(path).config.is_causal:
                raise UnsupportedModelError(embeds_only(display_name(str(path))))

    def _weights(self) -> list[Weights]:
        return list({c.weights.name: c.weights for c in self.candidates}.values())

    def _fingerprint(self, weights: Weights) -> str:
        if weights.path is not None:
            return digest_of(fingerprint(weights.path))
        needs_text = weights.method != "rtn"
        text = _content(self._calibrate) if needs_text else ""
        return digest_of(__version__, fingerprint(self.source), weights.name, str(text))

    def _check_room(self, missing: Sequence[Weights]) -> None:
        """Raise, before anything is written, where the disk cannot hold all candidates at once."""
        if not missing:
            return
        source = open_source(self.source)
        need = 0
        for weights in missing:
            assert weights.target is not None
            recipe = new_recipe(
                source, self.path_of(weights), method=weights.method, target=weights.target
            )
            need += int(_PACKED * sum(tensor.num_bytes for tensor in recipe.tensors))
        self.work.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.work).free
        if free < need + _SPARE_BYTES:
            raise OutputError(
                f"{len(missing)} candidates take {need / 1e6:,.0f} MB in {self.work}, the disk "
                f"has {free / 1e6:,.0f} MB free: name fewer --weights, or a larger disk with --keep"
            )

    def _make(self, weights: Weights) -> None:
        out = self.path_of(weights)
        out.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["quantize", str(self.source), "-o", str(out), *weights.arguments()]
        if weights.method != "rtn" and self._calibrate is not None:
            arguments += ["--calibrate", str(self._calibrate)]
        run_command([*arguments, *self._threads(), "--json"], f"making {weights.name}")

    # ---- jobs ----

    def _key(self, what: str, candidate: Candidate) -> str:
        return f"{what} {candidate.name} {self._prints[candidate.weights.name]}"

    def _quality_jobs(self) -> Iterator[Job]:
        for candidate in self.candidates:
            if self.quality.text is not None:
                yield self._job("text", candidate, f"reading with {candidate.name}", self._read)
            if self.quality.humaneval:
                yield self._job(_PROBLEMS, candidate, f"HumanEval, {candidate.name}", self._ask)

    def _speed_jobs(self) -> Iterator[Job]:
        """Rounds over all candidates in turn, back and forth: what the machine does hits all."""
        for idx in range(self.load.rounds):
            for candidate in self.candidates[:: 1 if idx % 2 == 0 else -1]:
                what = f"round {idx + 1} of {self.load.rounds}, {candidate.name}"

                def time_it(candidate: Candidate, idx: int = idx) -> dict[str, Any]:
                    return self._time(candidate, idx)

                yield self._job(f"speed {idx}", candidate, what, time_it)

    def _job(
        self, kind: str, candidate: Candidate, what: str,
        run: Callable[[Candidate], dict[str, Any]],
    ) -> Job:  # fmt: skip
        return Job(key=self._key(kind, candidate), what=what, run=lambda: run(candidate))

    def _read(self, candidate: Candidate) -> dict[str, Any]:
        quality = self.quality
        arguments = [
            "--text", str(quality.text), "--context", str(quality.context),
            "--activations", quality.activations, "--against", str(self.source),
            "--against-kv-dtype", REFERENCE_KV, *_limit(quality.windows),
        ]  # fmt: skip
        found: dict[str, Any] = self._evaluate(candidate, "text", arguments)["text"]
        return found

    def _ask(self, candidate: Candidate) -> dict[str, Any]:
        quality = self.quality
        arguments = ["--humaneval", "--allow-code-execution", *_limit(quality.problems)]
        arguments += ["--max-tokens", str(quality.max_tokens)]
        if quality.humaneval_file is not None:
            arguments += ["--humaneval-file", quality.humaneval_file]
        found = self._evaluate(candidate, _PROBLEMS, arguments)
        answers: dict[str, Any] = found["generation"]["model"]["humaneval"]
        return answers

    def _evaluate(
        self, candidate: Candidate, what: str, arguments: Sequence[str]
    ) -> dict[str, Any]:
        digest = digest_of(self.state_path.name, self._key(what, candidate))
        state = self.work / f"eval-{digest}.jsonl"
        return run_command(
            [
                "eval", str(self.path_of(candidate.weights)), "--kv-dtype", candidate.kv_dtype,
                *arguments, *self._threads(), "--state", str(state), "--json",
            ],
            candidate.name,
        )  # fmt: skip

    def _time(self, candidate: Candidate, idx: int) -> dict[str, Any]:
        load = self.load
        spec = Spec(
            path=str(self.path_of(candidate.weights)), kv_dtype=candidate.kv_dtype,
            batches=load.batches, input_tokens=load.input_tokens,
            output_tokens=load.output_tokens, num_threads=load.num_threads, seed=idx,
        )  # fmt: skip
        return run_speed(msgspec.json.encode(spec).decode(), candidate.name)

    def _threads(self) -> list[str]:
        threads = self.load.num_threads
        return [] if threads is None else ["--threads", str(threads)]


def _limit(count: int | None) -> list[str]:
    return [] if count is None else ["--limit", str(count)]


def _content(path: Path | None) -> str | None:
    try:
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ParameterError(
            f"{path} cannot be read ({error.strerror}): name another file"
        ) from None
