"""The report for a terminal, and the line that lives while a run goes on."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from paceline.bench.compare import MAX_UNANSWERED
from paceline.bench.exchange import OUTCOMES
from paceline.bench.load import Load
from paceline.bench.units import format_ms

_LATENCIES = {"ttft": "TTFT", "ttfo": "TTFO", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
_OWNERS = {"warmup": "warm-up requests", "cut": "requests that the end cut",
           "error": "failed requests", "broken": "broken ones", "timeout": "timed-out ones",
           "refused": "refused ones"}  # fmt: skip
_LOST = ("cut", "unsent")  # neither answered nor failed: shown where there are some
_OF_A_PAIR = ("rate", "first", "other", "first_answered", "other_answered",
              "runs_with_a_late_client")  # fmt: skip
_FILE_COLUMNS = 200
_MIN_COLUMNS_FOR_SD = 100
_MIN_COLUMNS_FOR_ALL = 130
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def report_console(file: IO[str] | None = None) -> Console:
    """Return the console of a report, on stdout by default.

    What it prints is text: names and errors come from servers and users, and are no markup. A
    file has no edge at which tables must fold.
    """
    console = Console(file=file, soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


class LiveLine:
    """One line on stderr: what runs, and how it goes. Nothing where stderr is no terminal.

    Written by hand: a refresh of rich's live display took 0.3 ms, at worst 5, of the event loop.
    """

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("")

    def update(self, load: Load, labels: dict[str, Any]) -> None:
        recorder = load.recorder
        second = max(0.0, time.perf_counter() - recorder.epoch)  # it begins a moment later
        rate = recorder.tokens_by_second.get(int(second) - 1, 0.0)
        what = " ".join(f"{value}" for value in labels.values())
        self._write(
            f"{what}  {second:.0f} s  {recorder.num_ended} done, {load.num_open} open, "
            f"{recorder.num_missed} missed  {rate:.0f} tok/s"
        )

    def _write(self, text: str) -> None:
        if self._is_shown:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{text[:width]}")
            sys.stderr.flush()


def print_report(document: dict[str, Any], console: Console) -> None:
    """Print a whole result, as `--json` gives it."""
    stages = document["stages"]
    if len(stages) == 1:
        _print_stage(stages[0], console)
    elif stages:
        _print_stages(stages, console)
    if document.get("comparison"):
        _print_comparison(document["comparison"], console)
    for search in document.get("searches", ()):
        _print_search(search, console)
    for target, knee in document.get("knees", {}).items():
        shown = "none of the rates" if knee is None else f"{knee:g} requests/s"
        console.print(f"{target} keeps up with {shown}")
    if document["interrupted"]:
        console.print("interrupted: what was measured until then", style="yellow")


def _print_stage(stage: dict[str, Any], console: Console) -> None:
    requests = stage["requests"]
    parts = [f"{requests[name]} {name}" for name in OUTCOMES if requests[name] or name == "ok"]
    for name in ("empty", "warmup"):
        if requests[name]:
            parts.append(f"{requests[name]} {name}")
    if requests["unsent"]:
        parts.append(f"{requests['unsent']} more were due and not sent")
    console.print(
        f"{stage['target']}: {requests['measured']} requests in {stage['window_s']:.1f} s "
        f"({', '.join(parts)})"
    )
    if requests["cut"] > requests["ok"] and not stage["interrupted"]:
        hint = "  most were still open at the end: --drain 60s waits for them"
        console.print(hint, style="yellow")
    for error in stage["errors"][:5]:
        console.print(f"  {error['count']} x {error['what']}", style="red")
    if any(figures["count"] for figures in stage["latency_ms"].values()):
        console.print(_latency_table(stage, has_sd=console.width >= _MIN_COLUMNS_FOR_SD))
    _print_rates(stage, console)
    _print_goodput(stage, console)
    _print_worth(stage, console)
    _print_client(stage, console)


def _print_worth(stage: dict[str, Any], console: Console, of: str = "") -> None:
    """Say how many answers are valid, and what tokens cost, where the one or the other is known."""
    requests = stage["requests"]
    if requests["checked"]:
        console.print(f"{of}valid answers: {requests['valid']} of {requests['checked']}")
    for name, value in stage["price"].items():
        console.print(f"{of}{name.replace('_', ' ')}: {value:.4g}")


def _print_rates(stage: dict[str, Any], console: Console) -> None:
    rates, load = stage["throughput"], stage["concurrency"]
    console.print(
        f"{rates['output_tokens_per_s']:.1f} output tok/s, "
        f"{_input_rates(rates)}, {rates['requests_per_s']:.3g} requests/s"
    )
    parts = [f"{load['mean']:.3g} requests open on average, {load['peak']} at most"]
    if rates["peak_output_tokens_per_s"] is not None:
        parts.append(f"{rates['peak_output_tokens_per_s']:.1f} output tok/s in the best second")
    if (user := rates["user_tokens_per_s"])["count"]:
        parts.append(f"{user['p50']['value']:.1f} tok/s a reader (p50)")
    console.print("; ".join(parts))
    sizes = [
        f"{name} {lengths['mean']['value']:.1f} ({lengths['min']:.0f} to {lengths['max']:.0f})"
        for name in ("input", "output")
        if (lengths := stage["tokens"][name])["count"]
    ]
    if sizes:
        console.print(f"tokens a request, mean: {', '.join(sizes)}")
    if others := [
        f"{num:.0f} of {_OWNERS[name]}"
        for name, num in rates["output_tokens_of"].items()
        if name != "ok"
    ]:
        console.print(
            f"tok/s counts {rates['output_tokens']:.0f} tokens that came in the window, among them "
            f"{', '.join(others)}"
        )


def _input_rates(rates: dict[str, Any]) -> str:
    if rates["input_tokens_per_s"] is None:
        return "input tok/s unknown (no usage; name a --tokenizer to count it)"
    return (
        f"{rates['input_tokens_per_s']:.1f} input tok/s, {rates['total_tokens_per_s']:.1f} in all"
    )


def _latency_table(stage: dict[str, Any], *, has_sd: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (*_COLUMNS, "max", *(["sd"] if has_sd else [])):
        table.add_column(name, justify="right")
    rows = _latency_rows("", stage["latency_ms"])
    for kind, figures in stage["classes"].items() if len(stage["classes"]) > 1 else ():
        rows += _latency_rows(f"{kind} ", figures["latency_ms"])
    rows += [(f"server: {name}", figures) for name, figures in stage["server_ms"].items()]
    for title, figures in rows:
        if figures["count"]:
            cells = [_with_interval(figures[name]) for name in _COLUMNS]
            cells.append(format_ms(figures["max"] / 1e3))
            if has_sd:
                sd = figures["std"]
                cells.append(format_ms(None if sd is None else sd / 1e3))
            table.add_row(title, *cells)
    return table


def _latency_rows(prefix: str, latency: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return titles and figures. TTFO is shown where it is not TTFT: answers began to reason."""
    return [
        (f"{prefix}{title}", latency[name])
        for name, title in _LATENCIES.items()
        if name != "ttfo" or latency["ttfo"] != latency["ttft"]
    ]


def _with_interval(figure: dict[str, float | None]) -> str:
    """Return "12.3 ms ±5 %": the larger side of the interval, "±?" where it is unbounded."""
    value, low, high = figure["value"], figure["low"], figure["high"]
    assert value is not None
    if low is None or high is None:
        return f"{format_ms(value / 1e3)} ±?"
    share = max(value - low, high - value) / value if value else 0.0
    return f"{format_ms(value / 1e3)} ±{100 * share:.0f}%"


def _print_goodput(stage: dict[str, Any], console: Console) -> None:
    goodput = stage["goodput"]
    if not goodput["objectives_ms"]:
        return
    rows = [("all", goodput)]
    if len(stage["classes"]) > 1:
        rows += [(kind, figures["goodput"]) for kind, figures in stage["classes"].items()]
    for kind, figures in rows:
        if figures["attainment"] is None or not figures["objectives_ms"]:
            continue
        share = figures["attainment"]
        cut = f"; {figures['cut']} cut by the end are left out" if figures["cut"] else ""
        if figures["unsent"]:
            cut = f"; {figures['unsent']} were not sent, and count as missed" + cut
        console.print(
            f"goodput, {kind}: {figures['requests_per_s']:.3g} requests/s; within the objective "
            f"{figures['met']} of {figures['met'] + figures['missed']} = "
            f"{100 * share['value']:.1f} % "
            f"[{100 * share['low']:.1f}, {100 * share['high']:.1f}]{cut}"
        )


def _name(stage: dict[str, Any]) -> str:
    """Return "target, 2/s, round 1": which stage a line is about."""
    rate = f", {stage['rate']:g}/s" if "rate" in stage else ""
    number = f", round {stage['round'] + 1}" if "round" in stage else ""
    return f"{stage['target']}{rate}{number}"


def _print_client(stage: dict[str, Any], console: Console) -> None:
    client = stage["client"]
    if client["is_bottleneck"]:
        console.print(
            f"{_name(stage)}: the client was the bottleneck: {'; '.join(client['reasons'])}. "
            "Run it on another machine, or ask for less",
            style="bold red",
        )
    if stage["tokens"]["unread_events"]:
        console.print(
            f"{_name(stage)}: {stage['tokens']['unread_events']} events of the streams are no "
            "JSON object",
            style="red",
        )
    if "events" in stage["tokens"]["output_from"]:
        console.print(
            f"{_name(stage)}: {stage['tokens']['output_from']['events']} answers came without "
            "usage: their tokens are counted as text events (name a --tokenizer to count them)",
            style="yellow",
        )


def _print_stages(stages: Sequence[dict[str, Any]], console: Console) -> None:
    """One row per load and target; figures of several rounds are medians.

    A narrow terminal gets two tables, one of counts and rates and one of latencies.
    """
    lost = [name for name in _LOST if _count(stages, name)]
    counts = ["target", "rate", "rounds", "ok", "failed", *lost]
    latencies = ["TTFT p50", "TTFT p95", "TPOT mean", "ITL p99", "E2E p95"]
    rates = ["output tok/s", "within", "good req/s"]
    rows = []
    by_load: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for stage in stages:
        by_load.setdefault((stage["target"], stage.get("rate")), []).append(stage)
    for (target, rate), rounds in by_load.items():
        shown = "-" if rate is None else f"{rate:g}"
        cells = [target, shown, str(len(rounds)), *_cells(rounds, lost)]
        rows.append(dict(zip([*counts, *latencies, *rates], cells, strict=True)))
    whole = [[*counts, *latencies, *rates]]
    halves = [[*counts, *rates], [*counts[:2], *latencies]]
    for titles in halves if console.width < _MIN_COLUMNS_FOR_ALL else whole:
        table = Table(box=None, pad_edge=False)
        for title in titles:
            table.add_column(title, justify="left" if title == "target" else "right")
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        console.print(table)
    for stage in stages:
        for error in stage["errors"][:2]:
            console.print(f"{_name(stage)}: {error['count']} x {error['what']}", style="red")
        _print_worth(stage, console, of=f"{_name(stage)}: ")
        _print_client(stage, console)


def _count(rounds: Sequence[dict[str, Any]], name: str) -> int:
    return sum(stage["requests"][name] for stage in rounds)


def _cells(rounds: Sequence[dict[str, Any]], lost: Sequence[str]) -> list[str]:
    ok, cut, measured = (_count(rounds, name) for name in ("ok", "cut", "measured"))

    def latency(name: str, figure: str) -> str:
        found = [s["latency_ms"][name] for s in rounds if s["latency_ms"][name]["count"]]
        return (
            format_ms(statistics.median(f[figure]["value"] for f in found) / 1e3) if found else "-"
        )

    def middle(*path: str) -> float:
        return float(statistics.median(stage[path[0]][path[1]] for stage in rounds))

    judged = [stage["goodput"]["attainment"] for stage in rounds]
    shares = [share["value"] for share in judged if share is not None]
    has_objective = bool(rounds[0]["goodput"]["objectives_ms"])
    return [
        str(ok),
        str(measured - ok - cut),
        *(str(_count(rounds, name)) for name in lost),
        latency("ttft", "p50"),
        latency("ttft", "p95"),
        latency("tpot", "mean"),
        latency("itl", "p99"),
        latency("e2e", "p95"),
        f"{middle('throughput', 'output_tokens_per_s'):.1f}",
        f"{100 * statistics.median(shares):.0f} %" if shares and has_objective else "-",
        f"{middle('goodput', 'requests_per_s'):.3g}" if has_objective else "-",
    ]


def _print_comparison(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("rate", "metric", "first", "", "other", "", "ratio [95 %]", "verdict"):
        table.add_column(title, justify="right" if title in ("rate", "") else "left")
    for row in rows:
        ratio = row["ratio"]
        shown = "-"
        if ratio is not None:
            shown = f"{ratio['value']:.2f}"
            if ratio["low"] is not None:
                shown += f" [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        table.add_row(
            "-" if row["rate"] is None else f"{row['rate']:g}",
            f"{row['metric']} ({row['unit']})",
            row["first"],
            f"{row['first_median']:.1f}",
            row["other"],
            f"{row['other_median']:.1f}",
            shown,
            f"{row['verdict']} is better" if row["verdict"] else "no verdict",
        )
    console.print(table)
    _print_doubts(rows, console)


def _print_doubts(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Say of each pair of servers what keeps a comparison from calling one of them better."""
    for rate, first, other, ours, theirs, num_late in dict.fromkeys(
        tuple(row[name] for name in _OF_A_PAIR) for row in rows
    ):
        at = "" if rate is None else f"at {rate:g}/s "
        if num_late:
            console.print(
                f"{at}{first} and {other}: no verdict, as the client was the bottleneck in "
                f"{num_late} of the runs",
                style="bold red",
            )
        if abs(ours - theirs) > MAX_UNANSWERED:
            console.print(
                f"{at}{first} answered {100 * ours:.0f} % of its requests, {other} "
                f"{100 * theirs:.0f} %: who answered fewer is not called better by its latencies",
                style="yellow",
            )


def _print_search(search: dict[str, Any], console: Console) -> None:
    share = f"{100 * search['at_least']:g} %"
    if search["rate"] is None and search["held_not_at"] is None:
        text = f"{search['target']}: the search ended before a rate was judged"
    elif search["rate"] is None:
        text = f"{search['target']}: at no rate tried are {share} within the objective"
    else:
        above = search["held_not_at"]
        edge = "no failing rate was reached" if above is None else f"not at {above:.3g}"
        text = (
            f"{search['target']}: at least {share} within the objective up to "
            f"{search['rate']:.3g} requests/s ({edge})"
        )
    console.print(text, style="bold")
