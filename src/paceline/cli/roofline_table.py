"""The tables of `paceline roofline`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from paceline.engine.memory import format_bytes
from paceline.measure.ceilings import QUIET_CORES, MachineCeilings
from paceline.measure.roofline import Latency, Roofline, StepReport

_FILE_WIDTH = 120
_SMALL_SHARE = 0.005  # kinds of ops below it are told together


def print_machine(found: MachineCeilings) -> None:
    machine = found.machine
    quota = "" if machine.quota is None else f", quota of {machine.quota:g} CPUs"
    _say(f"{machine.cpu}: {machine.num_cores} cores{quota}, {machine.isa}")
    if found.busy_cores > QUIET_CORES:
        _say(
            f"Others kept {found.busy_cores:.1f} cores busy when the ceilings were measured: "
            "repeat with --refresh when the machine is quiet."
        )
    levels = [read.level for read in found.by_threads[0].reads]
    rows = [
        [
            str(ceilings.num_threads),
            _giga(ceilings.int8_macs_s),
            "–" if ceilings.bf16_macs_s is None else _giga(ceilings.bf16_macs_s),
            _giga(ceilings.f32_macs_s),
            *(_giga(read.bytes_s) for read in ceilings.reads),
        ]
        for ceilings in found.by_threads
    ]
    head = ["threads", "int8", "bf16", "f32", *levels]
    _print(head, rows, title="ceilings: GMAC/s, and GB/s read from each level")


def print_roofline(found: Roofline) -> None:
    _say(
        f"{found.model}, {found.num_threads} thread{'s' if found.num_threads > 1 else ''}: "
        f"{format_bytes(found.weight_bytes)} of weights read a step, "
        f"{_number(found.token_macs / 1e6)} M multiply-adds a token and "
        f"{_number(found.logit_macs / 1e6)} M a row of logits, "
        f"{format_bytes(found.kv_token_bytes)} of KV ({found.kv_dtype}) a token"
    )
    rows = [
        _latency_row(f"TTFT of {found.context} tokens", found.ttft, found.prefill),
        _latency_row(f"TPOT, {_streams(found.batch)} at {found.context}", found.tpot, found.decode),
    ]
    _print(["", "floor ms", "measured ms", "ratio", "of it engine", "bound by"], rows)
    _print_ops(f"a prompt's chunk of {found.prefill.shape.num_tokens} tokens", found.prefill)
    _print_ops(f"a decode step of {_streams(found.batch)}", found.decode)
    _print(
        ["tokens", "step ms", "floor ms", "ms a token", "times one token's"],
        [
            [
                str(point.num_tokens),
                _ms(point.measured_s),
                _ms(point.floor_s),
                _ms(point.measured_s / point.num_tokens),
                f"{point.measured_s / found.step_costs[0].measured_s:.2f}",
            ]
            for point in found.step_costs
        ],
        title="cost of a step by its tokens (one sequence, no context before)",
    )
    _say(_turning_point(found))
    _say(_step_advice(found))


def _turning_point(found: Roofline) -> str:
    if found.compute_bound_batch is None:
        return f"Decoding at context {found.context} is memory bound at any batch."
    return (
        f"By the ceilings decoding turns compute bound at a batch of {found.compute_bound_batch} "
        f"(context {found.context})."
    )


def _step_advice(found: Roofline) -> str:
    table = found.table
    one = table.seconds(1)
    cheap, in_time = table.tokens_within(1.5 * one, kind="verify"), table.tokens_within(0.05)
    if cheap < 2:
        drafts = (
            f"A step of 2 tokens with all logits costs {table.seconds(2, kind='verify') / one:.1f} "
            "times one of 1 token: drafts do not pay here."
        )
    else:
        drafts = (
            f"A step of {cheap} tokens with all logits costs 1.5 times one of 1 token: drafts up "
            "to there are cheap."
        )
    if not in_time:
        return f"{drafts} No token of a prompt fits into 50 ms."
    return f"{drafts} In 50 ms a prompt gets on by {in_time} token{'s' if in_time > 1 else ''}."


def _print_ops(title: str, step: StepReport) -> None:
    total = sum(row.measured_s for row in step.ops)
    rows, rest = [], []
    for row in step.ops:
        if row.measured_s < _SMALL_SHARE * total and not row.floor_s:
            rest.append(row)
            continue
        rows.append([
            f"{row.kind} x{row.num_ops}", _number(row.macs / 1e6), _number(row.num_bytes / 1e6),
            _ms(row.floor_s), _ms(row.measured_s),
            f"{row.floor_s / row.measured_s:.0%}" if row.floor_s else "–",
            f"{row.measured_s / total:.0%}",
        ])  # fmt: skip
    if rest:
        spent = sum(row.measured_s for row in rest)
        rows.append(
            [f"{len(rest)} other kinds", "", "", "", _ms(spent), "–", f"{spent / total:.0%}"]
        )
    head = ["op", "M MACs", "MB read", "floor ms", "ms", "of ceiling", "of step"]
    _print(head, rows, title=f"{title}: {step.bound} bound")


def _latency_row(name: str, latency: Latency, step: StepReport) -> list[str]:
    return [
        name, _ms(latency.floor_s), _ms(latency.measured_s), f"{latency.ratio:.2f}x",
        f"{_ms(latency.engine_s)} ms", step.bound,
    ]  # fmt: skip


def _print(head: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console().print(table)
    _say("")


def _say(text: str) -> None:
    _console().print(text, markup=False, highlight=False)


def _console() -> Console:
    # Rich takes 80 columns where nobody looks; a file has room for whole rows.
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"


def _giga(value: float) -> str:
    return _number(value / 1e9)


def _ms(seconds: float) -> str:
    return _number(seconds * 1e3)


def _number(value: float) -> str:
    """Return three significant digits, and no exponent: 1,648, 59.4, 0.22."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
