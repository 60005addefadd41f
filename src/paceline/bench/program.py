"""Program: everything a `paceline bench` call asks for, and running it."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from paceline import __version__
from paceline.bench.arrivals import Arrivals, Closed
from paceline.bench.compare import compare, run_rounds
from paceline.bench.http import Origin
from paceline.bench.load import Load
from paceline.bench.search import find_knee, find_rate
from paceline.bench.stage import Plan, Session, StageResult
from paceline.bench.target import Endpoint, Target, find_model
from paceline.errors import ParameterError

SCHEMA_VERSION = 1
_SEARCH_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`loads` are run one after the other; with `search_from` the rate is searched instead."""

    urls: Sequence[tuple[str, str]]  # (name, URL)
    plan: Plan
    loads: Sequence[tuple[dict[str, Any], Arrivals | Closed]] = ()
    search_from: float | None = None
    arrivals_at: Callable[[float], Arrivals] | None = None
    at_least: float = 0.95
    num_rounds: int = 1
    model: str | None = None
    endpoint: Endpoint = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    ignores_eos: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  # what the user asked, for the record


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`document` is the JSON summary, `plots` stand beside its stages. `log_error` says why the
    log is not whole."""

    document: dict[str, Any]
    plots: list[dict[str, Any]]
    log_error: str | None = None


def run_program(
    program: Program,
    *,
    log: Path | None = None,
    on_progress: Callable[[Load, dict[str, Any]], None] | None = None,
) -> Result:
    """Run it all. Ctrl-C ends the run and reports what there is.

    A second one, or one before the first load began, raises KeyboardInterrupt.
    """
    _allow_many_files()
    with contextlib.ExitStack() as stack:
        lines = None if log is None else _Log(log)
        if lines is not None:
            stack.callback(lines.close)
        write_line = None if lines is None else lines.write
        session = Session(write_line=write_line, on_progress=on_progress)
        # uvloop leaves its own handler behind, which does nothing once the loop is closed.
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        runner = stack.enter_context(asyncio.Runner(loop_factory=_new_loop))
        try:
            result = runner.run(_run(program, session))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        if lines is None:
            return result
        lines.write({"type": "summary", **result.document})
        lines.close()
        return replace(result, log_error=lines.error)


async def _run(program: Program, session: Session) -> Result:
    _handle_interrupts(session)
    targets = [await _target(program, name, url) for name, url in program.urls]
    results: list[StageResult] = []
    searches = []
    if program.search_from is not None:
        for target in targets:
            if not session.is_interrupted:
                search = await _search(program, session, target)
                results.extend(search.stages)
                searches.append(search.summary())
    else:
        results = await run_rounds(
            session, program.plan, targets, program.loads, program.num_rounds
        )
    summaries = [result.summary for result in results]
    document = {
        "version": SCHEMA_VERSION,
        "paceline": __version__,
        "machine": f"{platform.system()} {platform.machine()}, {platform.node()}",
        "config": {
            **program.config,
            "targets": {target.name: target.origin.url for target in targets},
            "models": {target.name: target.model for target in targets},
        },
        "stages": summaries,
        "searches": searches,
        "knees": _knees(targets, summaries) if len(program.loads) > 1 else {},
        "comparison": compare(summaries) if len(targets) > 1 and not searches else [],
        "interrupted": session.is_interrupted,
    }
    return Result(document=document, plots=[result.plots for result in results])


async def _target(program: Program, name: str, url: str) -> Target:
    origin = Origin.parse(url)
    listed = await find_model(origin, program.headers) if program.model is None else program.model
    return Target(
        name=name, origin=origin, model=listed, endpoint=program.endpoint,
        headers=program.headers, fields=program.fields, ignores_eos=program.ignores_eos,
    )  # fmt: skip


async def _search(program: Program, session: Session, target: Target) -> Any:
    assert program.search_from is not None
    assert program.arrivals_at is not None
    limits = program.plan.limits
    if limits.drain_s == 0:  # or late answers would be cut, not judged
        limits = replace(limits, drain_s=_SEARCH_DRAIN_S)
    return await find_rate(
        session,
        replace(program.plan, limits=limits),
        target,
        program.arrivals_at,
        start=program.search_from,
        at_least=program.at_least,
    )


def _knees(
    targets: Sequence[Target], summaries: Sequence[dict[str, Any]]
) -> dict[str, float | None]:
    swept = [summary for summary in summaries if "rate" in summary]
    return {
        target.name: find_knee([s for s in swept if s["target"] == target.name])
        for target in targets
    }


def _handle_interrupts(session: Session) -> None:
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None

    def on_interrupt() -> None:
        if session.is_interrupted or not session.has_begun:
            main.cancel()
        session.interrupt()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _allow_many_files() -> None:
    """Raise the limit on open files as far as it goes: every stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Log:
    """The lines of a run. A disk that fails ends the log, and `error` says so: not the run."""

    def __init__(self, path: Path) -> None:
        self.error: str | None = None
        self._path = path
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as error:
            raise ParameterError(f"--log {path} cannot be written: {error.strerror}") from None

    def write(self, line: dict[str, Any]) -> None:
        if self.error is None:
            try:
                self._file.write(msgspec.json.encode(line) + b"\n")
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = self.error or f"--log {self._path} could not be written: {error.strerror}"
