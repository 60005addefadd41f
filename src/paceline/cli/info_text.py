"""What `paceline info` prints in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.engine.memory import format_bytes

_GB, _MB = 1e9, 1e6
_LARGE = 5e8  # parameters from which on bytes are told in GB
_COLUMNS = 100  # of a table in a file or a pipe


def print_facts(facts: dict[str, Any]) -> None:
    """Print what is known of a model, and its memory in each format."""
    console = Console(soft_wrap=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _COLUMNS
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(name, value)
    console.print(table)
    if facts["formats"]:
        console.print()
        console.print(_formats(facts))
        console.print(_note(facts), style="dim")


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    count = ("parameters", f"{facts['parameters'] / 1e6:,.1f} M")
    if "family" not in facts:
        return [count]
    rows = [("name", facts["name"])]
    if "path" in facts:
        rows.append(("file", f"{facts['path']} ({facts['source']})"))
    rows += [
        ("architecture", f"{facts['family']}, {facts['layers']} layers of {facts['hidden_size']}, "
         f"{facts['heads']} heads ({facts['kv_heads']} KV) of {facts['head_dim']}, "
         f"MLP {facts['intermediate_size']}"),
        count,
        ("vocabulary", f"{facts['vocab_size']:,} tokens"
         + (", embeddings tied" if facts["tied_embeddings"] else "")),
        ("context", f"{facts['context']:,} tokens"),
    ]  # fmt: skip
    if "path" in facts:
        rows += [
            ("chat template", "yes" if facts["chat_template"] else "no"),
            ("weights", format_bytes(facts["weight_bytes"])),
            *((f"  {name}", format_bytes(count))
              for name, count in facts["weight_bytes_by_format"].items()),
        ]  # fmt: skip
    return [*rows, *_kv_rows(facts)]


def _kv_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Bytes of a token and of all sequences by KV format, and their sum with a file's weights."""
    memory, chosen = facts["memory"], facts["kv_dtype"]
    totals, tokens = memory["kv_bytes_by_dtype"], facts["kv_bytes_per_token_by_dtype"]
    held = f"{format_bytes(memory['kv_bytes'])} KV"
    if "total_bytes" in memory:
        held += f" + weights = {format_bytes(memory['total_bytes'])}"
    return [
        ("KV a token", f"{format_bytes(tokens[chosen])} ({chosen})"),
        *((f"  {name}", f"{format_bytes(count)}, {format_bytes(totals[name])} in all")
          for name, count in tokens.items() if name != chosen),
        (f"{memory['seqs']} x {memory['context']:,} tokens", held),
    ]  # fmt: skip


def _formats(facts: dict[str, Any]) -> Table:
    """What weights, cache and steps take in each format."""
    columns = {"codes": "code_bytes", "+ scales": "extra_bytes", "= weights": "weight_bytes"}
    if "memory" in facts:
        columns |= {"+ KV": "kv_bytes", "+ step": "step_bytes", "= all": "total_bytes"}
    table = Table(box=None, pad_edge=False)
    table.add_column("weights in", no_wrap=True)
    for title in ("bits", *columns):
        table.add_column(title, justify="right", no_wrap=True)
    _, size, digits = _unit(facts)
    for row in facts["formats"]:
        sizes = [f"{row[key] / size:,.{digits}f}" for key in columns.values()]
        table.add_row(row["format"], f"{row['bits_per_weight']:.2f}", *sizes)
    return table


def _unit(facts: dict[str, Any]) -> tuple[str, float, int]:
    """Name and size of the unit of the table, and digits."""
    return ("GB", _GB, 2) if facts["parameters"] >= _LARGE else ("MB", _MB, 1)


def _note(facts: dict[str, Any]) -> str:
    name, size, _ = _unit(facts)
    said = f"{name} of {size:,.0f} bytes; bits are those of a weight with its scales. "
    if "memory" not in facts:
        return said + (
            "All weights are taken to be in the format: a --shape or a config.json tells of "
            "embeddings, KV cache and steps too"
        )
    return said + (
        "scales: and what has more bits than the rest, embedding and head beside 4 and 5, norms; "
        f"KV: {facts['kv_dtype']}; step: activations, logits, tables of rope. Python and libraries "
        "take about 50 MB more"
    )
