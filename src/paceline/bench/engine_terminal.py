"""What `bench offline` and `bench spec` print: the engine without HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.terminal import report_console
from paceline.bench.units import format_ms


@contextmanager
def show_status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what runs now, on stderr, where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("loading") as status:
        yield lambda text: status.update(text)


def print_offline(document: dict[str, Any]) -> None:
    """Print the rows of `paceline bench offline`: medians, and ranges over the rounds."""
    console = report_console()
    table = Table(box=None, pad_edge=False)
    for title in ("batch", "input", "output", "TTFT", "prefill tok/s", "decode tok/s",
                  "a stream", "output tok/s", "total tok/s"):  # fmt: skip
        table.add_column(title, justify="right", no_wrap=True)
    for row in document["rows"]:
        decode = row["decode_tokens_per_s"]
        table.add_row(
            str(row["batch"]),
            str(row["input_tokens"]),
            str(row["output_tokens"]),
            format_ms(row["ttft_s"]["median"]),
            _with_range(row["prefill_tokens_per_s"]),
            _with_range(decode),
            "-" if decode is None else f"{decode['median'] / row['batch']:.1f}",
            f"{row['output_tokens_per_s']['median']:.1f}",
            f"{row['total_tokens_per_s']['median']:.1f}",
        )
    console.print(f"{document['model']}, {document['isa']}, {document['num_threads']} threads")
    console.print(table)
    if document["preemptions"]:
        console.print(
            f"{document['preemptions']} preemptions: the KV cache did not hold the batch; raise "
            "--kv-memory",
            style="yellow",
        )
    if document["interrupted"]:
        console.print("interrupted: what was measured until then", style="yellow")


def print_spec(document: dict[str, Any]) -> None:
    """Print the rows of `paceline bench spec`: medians, and ranges over the rounds."""
    console = report_console()
    table = Table(box=None, pad_edge=False)
    for title in ("workload", "batch", "plain tok/s", "tok/s", "speed-up", "predicted",
                  "right / drafted", "a draft", "same text"):  # fmt: skip
        table.add_column(title, justify="right", no_wrap=True)
    for row in document["rows"]:
        length, predicted = row["mean_accepted_length"], row["predicted_speed_up"]
        speed_up = row["speed_up"]
        table.add_row(
            row["workload"],
            str(row["batch"]),
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['tokens_per_s']:.1f}",
            f"{speed_up['median']:.2f} ({speed_up['low']:.2f} to {speed_up['high']:.2f})",
            "-" if predicted is None else f"{predicted:.2f}",
            f"{row['num_accepted']} / {row['num_drafted']}",
            "-" if length is None else f"{length:.1f}",
            "yes" if row["is_same_text"] else "NO",
        )
    console.print(
        f"{document['model']}, {document['isa']}, {document['num_threads']} threads, "
        f"{document['speculate']}",
        highlight=False,
    )
    console.print(table)


def _with_range(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure['median']:.1f} ({figure['low']:.1f} to {figure['high']:.1f})"
