"""What `paceline explain` prints: a table, and sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from paceline.cli.stages import Lines
from paceline.explain.causes import METRICS, WORDS, Metric
from paceline.explain.proposal import Change
from paceline.explain.report import Advice, Bound, Expected, Explanation
from paceline.explain.verify import Verification

_NAMES: dict[Metric, str] = {"ttft": "TTFT", "tpot": "TPOT"}
_FEW_CALLS = 20
_FILE_WIDTH = 120
_SMALL = 0.05  # of a percentile: causes below it are not named


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being done, for as long as it is; in lines where nobody looks."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines().show
        return
    with console.status("reading") as shown:
        yield shown.update


def print_explanation(found: Explanation) -> None:
    _say(_heading(found))
    table = Table(box=None)
    for name in ("", "ms", "floor ms", "times", "bound by", "made of"):
        table.add_column(name, justify="left" if name in ("", "bound by", "made of") else "right",
                         no_wrap=name != "made of")  # fmt: skip
    for bound in found.bounds:
        table.add_row(
            f"{_NAMES[bound.metric]} p{bound.percentile}", _ms(bound.value_ms),
            "" if bound.floor_ms is None else _ms(bound.floor_ms),
            "" if bound.ratio is None else f"{bound.ratio:.1f}x", bound.bound, _made_of(bound),
        )  # fmt: skip
    _console().print(table)
    _say("")
    for sentence in _sentences(found):
        _say(sentence)
    for note in found.notes:
        _say(f"Note: {note}.")
    _say("")
    if found.server is None:
        _say(
            "No option was evaluated: what was recorded does not tell the server's options, and "
            "not what its steps cost."
        )
        return
    if not found.advice:
        _say("No option of this build would lower a percentile by 5 % or more.")
        return
    rough = " (by how much is a guess: see the note)" if found.are_sizes_guesses else ""
    _say(f"What would help, by the measured cost of steps{rough}:")
    for number, advice in enumerate(found.advice, start=1):
        _say(f"{number}. {_advice(advice)}")


def print_verification(found: Verification) -> None:
    _say("")
    _say(
        f"Verified: {change_text(found.change)}, {_count(found.rounds, 'round')} in turns, "
        f"{found.num_calls} calls on each side{': ' + found.note if found.note else ''}"
    )
    table = Table(box=None)
    for name in ("", "before ms", "predicted ms", "measured ms"):
        table.add_column(name, justify="right" if name else "left")
    for outcome in found.outcomes:
        table.add_row(
            f"{_NAMES[outcome.metric]} p{outcome.percentile}", _ms(outcome.before_ms),
            _ms(outcome.predicted_ms), _ms(outcome.measured_ms),
        )  # fmt: skip
    if found.outcomes:
        _console().print(table)


def change_text(change: Change) -> str:
    return " ".join(f"{option} {value}".rstrip() for option, value in change.items())


def _heading(found: Explanation) -> str:
    server = found.server
    what = "" if server is None else f" of {server.model} on {_count(server.num_threads, 'thread')}"
    failed = f", {found.num_failed} that were no answers" if found.num_failed else ""
    return (
        f"{found.source}: {_count(found.num_calls, 'call')}{what}, "
        f"{_count(found.num_steps, 'step')}{failed}"
    )


def _sentences(found: Explanation) -> Iterator[str]:
    """Say for each metric what its median and its tail are made of."""
    for metric in METRICS:
        bounds = [bound for bound in found.bounds if bound.metric == metric]
        if not bounds:
            yield f"No call has a {_NAMES[metric]}."
            continue
        median, tail = bounds[0], bounds[-1]
        yield _sentence(median)
        if tail.cause != median.cause or tail.value_ms > 1.5 * median.value_ms:
            yield _sentence(tail)
        if median.num_calls < _FEW_CALLS:
            yield f"({_count(median.num_calls, 'call')}: a tail says little.)"


def _sentence(bound: Bound) -> str:
    share = bound.causes.get(bound.cause, 0.0) / bound.value_ms if bound.value_ms else 0.0
    floor = ""
    if bound.floor_ms is not None:
        floor = f"; alone on this machine it could be {_ms(bound.floor_ms)} ms"
    return (
        f"{_NAMES[bound.metric]} p{bound.percentile} is {_ms(bound.value_ms)} ms: {share:.0%} of "
        f"it is {WORDS[bound.cause]}{_overhead(bound)}{floor}."
    )


def _overhead(bound: Bound) -> str:
    """Name the parts of the ledger that most of it is, where overhead is the cause."""
    if bound.cause != "overhead":
        return ""
    parts = ((name, ms / bound.value_ms) for name, ms in bound.overhead.items())
    named = [f"{name} {share:.0%}" for name, share in parts if share >= _SMALL]
    return f" ({', '.join(named)})" if named else ""


def _advice(advice: Advice) -> str:
    gains = ", ".join(_effect(e) for e in advice.expected if e.after_ms < e.before_ms)
    losses = [e for e in advice.expected if e.after_ms > e.before_ms]
    if losses:
        worst = max(losses, key=lambda e: e.after_ms / e.before_ms)
        gains += (
            f"; but slower: {', '.join(map(_effect, losses))}, up to "
            f"{worst.after_ms / worst.before_ms - 1:.0%} more"
        )
    what = change_text(advice.change) or "a smaller format"
    price = f" Price: {advice.price}." if advice.price else ""
    if advice.whole_gain < 0:
        price += f" A trade: the mean call gets {-advice.whole_gain:.0%} longer."
    return f"{what}, as {advice.why}: {gains}.{price}"


def _effect(expected: Expected) -> str:
    return (
        f"{_NAMES[expected.metric]} p{expected.percentile} {_ms(expected.before_ms)} → "
        f"{_ms(expected.after_ms)} ms"
    )


def _made_of(bound: Bound) -> str:
    causes = [
        f"{cause.replace('_', ' ')} {ms / bound.value_ms:.0%}"
        for cause, ms in bound.causes.items()
        if bound.value_ms and ms >= _SMALL * bound.value_ms
    ]
    return ", ".join(causes)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _ms(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _say(text: str) -> None:
    _console().print(text, markup=False, highlight=False)


def _console() -> Console:
    # Rich takes 80 columns where nobody looks; a file has room for whole rows.
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_WIDTH)
