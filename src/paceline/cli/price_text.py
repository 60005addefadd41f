"""A price list in the terminal: sizes and speeds, and what they cost in quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.price.report import Row

_MB = 1e6


def print_prices(document: dict[str, Any], console: Console) -> None:
    """Print both tables, and what the marks and columns of them mean."""
    rows: list[Row] = document["candidates"]
    console.print(
        f"{document['model']}, {document['machine']['cpu']}, {document['machine']['isa']}, "
        f"{document['num_threads']} threads",
        style="bold",
    )
    settings = document["settings"]
    console.print(_speeds(rows, settings))
    first = settings["batches"][0]
    console.print(
        f"prompts of {settings['input_tokens']} tokens, answers of "
        f"{settings['output_tokens']}; medians over rounds in turn ({settings['rounds']}); TTFT, "
        f"TPOT and ± (half of what decoding spread) at batch {first}; memory: a process after "
        f"a batch of {max(settings['batches'])}",
        style="dim",
    )
    if any(row["text"] or row["humaneval"] for row in rows):
        console.print()
        console.print(_qualities(rows))
        console.print(_qualities_note(document), style="dim")
    if document["kept_in"] is not None:
        console.print(f"models and figures are kept in {document['kept_in']}", style="dim")
    for front in document["fronts"] if any(row["text"] for row in rows) else ():
        what, kl = front["axes"]
        console.print(
            f"best of {front['name']}: no other candidate is as good both in {what} and in {kl}",
            style="dim",
        )


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < 2 else "right", no_wrap=i >= 2)
    return table


def _speeds(rows: Sequence[Row], settings: dict[str, Any]) -> Table:
    batches = "/".join(map(str, settings["batches"]))
    table = _table(
        "weights", "KV", "disk MB", "memory MB", "TTFT ms", "TPOT ms",
        f"prefill tok/s at {batches}", f"decode tok/s at {batches}", "±",
    )  # fmt: skip
    for row in rows:
        memory, speed = row["memory"], row["speed"]
        first = speed[0]
        table.add_row(
            row["weights"], row["kv_dtype"], f"{row['disk_bytes'] / _MB:,.1f}",
            f"{memory['resident_bytes']['median'] / _MB:,.0f}",
            _ms(first["ttft_s"]), _ms(first["tpot_s"]),
            _along(speed, "prefill_tokens_per_s"), _along(speed, "decode_tokens_per_s"),
            _half_spread(first["decode_tokens_per_s"]),
        )  # fmt: skip
    return table


def _qualities(rows: Sequence[Row]) -> Table:
    has_problems = any(row["humaneval"] for row in rows)
    table = _table(
        "weights", "KV", "perplexity", "ratio to the source's", "mean KL", "top-1 %",
        *(["HumanEval pass@1 %"] if has_problems else []), "best of",
    )  # fmt: skip
    for row in rows:
        text = row["text"] or {}
        cells = [
            _value(text.get("perplexity"), 3), _value(text.get("perplexity_ratio"), 4),
            _value(text.get("kl_mean"), 5), _value(text.get("top1"), 1, scale=100),
        ]  # fmt: skip
        if has_problems:
            found = row["humaneval"]
            cells.append(_share(found and found["pass_at_1"]))
        table.add_row(row["weights"], row["kv_dtype"], *cells, ", ".join(row["fronts"]))
    return table


def _qualities_note(document: dict[str, Any]) -> str:
    """What the figures are measured over, and against what."""
    text = next((row["text"] for row in document["candidates"] if row["text"]), None)
    said = []
    if text is not None:
        quality = document["settings"]["quality"]
        said.append(
            f"{text['num_scored']:,} tokens of {quality['text']}, activations "
            f"{quality['activations']}, against the source over an f32 KV cache"
        )
    return "; ".join([*said, "± is half of a 95 % interval"])


def _ms(figure: dict[str, float] | None) -> str:
    return "–" if figure is None else f"{figure['median'] * 1e3:,.1f}"


def _along(speed: Sequence[dict[str, Any]], name: str) -> str:
    """Medians at all batches, as `205 / 731`."""
    found = [batch[name] for batch in speed]
    return " / ".join("–" if f is None else f"{f['median']:,.0f}" for f in found)


def _half_spread(figure: dict[str, float] | None) -> str:
    if figure is None or figure["low"] == figure["high"]:
        return "–"
    return f"{50 * (figure['high'] - figure['low']) / figure['median']:.0f} %"


def _share(figure: dict[str, Any] | None) -> str:
    """A share in percent with its interval, which is not symmetric."""
    if not figure:
        return "–"
    value, low, high = (f"{100 * figure[end]:.1f}" for end in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _value(figure: dict[str, Any] | None, digits: int, *, scale: float = 1.0) -> str:
    """A figure with half of its interval, as `1.0019 ± 0.0018`."""
    if not figure:
        return "–"
    said = f"{scale * figure['value']:.{digits}f}"
    if figure["low"] is None or figure["high"] is None:
        return said
    return f"{said} ± {scale * (figure['high'] - figure['low']) / 2:.{digits}f}"
