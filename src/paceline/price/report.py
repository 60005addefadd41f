"""What a price list says: a row a candidate, and the candidates that no other one beats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from paceline.bench.offline import spread
from paceline.engine.build import display_name
from paceline.measure.machine import this_machine
from paceline.price.candidates import Candidate
from paceline.price.run import REFERENCE_KV

if TYPE_CHECKING:
    from paceline.price.run import PriceList

Row = dict[str, Any]
_FIGURES = ("ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s")


class Front(Struct, frozen=True, kw_only=True):
    """Two axes. A candidate is on the front where no other is as good on both and better on one."""

    name: str
    axes: tuple[str, str]
    cost: Callable[[Row], float | None]  # less is better

    def members(self, rows: Sequence[Row]) -> list[str]:
        """Return the names of the rows on the front; a row without both figures is never."""
        points = {}
        for row in rows:
            cost, divergence = self.cost(row), kl_of(row)
            if cost is not None and divergence is not None:
                points[row["name"]] = (cost, divergence)
        return [name for name, point in points.items() if not _is_beaten(point, points)]


def _is_beaten(point: tuple[float, float], others: Mapping[str, tuple[float, float]]) -> bool:
    return any(
        other != point and all(a <= b for a, b in zip(other, point, strict=True))
        for other in others.values()
    )


def kl_of(row: Row) -> float | None:
    """Return the mean KL divergence of a row from the source; None where no text was read."""
    text = row["text"]
    return None if text is None else float(text["kl_mean"]["value"])


def held_bytes(row: Row) -> float:
    """Return the bytes of weights and KV cache: what of the memory depends on the formats."""
    memory = row["memory"]
    return float(memory["weight_bytes"] + memory["kv_bytes"])


def decode_speed(row: Row) -> float | None:
    """Return the decoding speed, tokens a second, at the first batch."""
    figure = row["speed"][0]["decode_tokens_per_s"]
    return None if figure is None else float(figure["median"])


def _negative_speed(row: Row) -> float | None:
    speed = decode_speed(row)
    return None if speed is None else -speed


def fronts(batch: int) -> tuple[Front, ...]:
    """Return the fronts of a list whose first batch is `batch`."""
    return (
        Front(
            name="memory", axes=("bytes of weights and KV cache", "mean KL from the source"),
            cost=held_bytes,
        ),
        Front(
            name="speed",
            axes=(f"decode tok/s at batch {batch}", "mean KL from the source"),
            cost=_negative_speed,
        ),
    )  # fmt: skip


def rows_of(candidates: Sequence[Candidate], measured: Mapping[str, Any]) -> list[Row]:
    """Return a row a candidate, in their order, each with the fronts that it is on."""
    rows = [_row(candidate, measured[candidate.name]) for candidate in candidates]
    for front in fronts(rows[0]["speed"][0]["batch"]):
        members = set(front.members(rows))
        for row in rows:
            row["fronts"] += [front.name] if row["name"] in members else []
    return rows


def document_of(model: str, listed: PriceList, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole list as one object, as --json prints it."""
    rows = rows_of(listed.candidates, measured)
    load, quality = listed.load, listed.quality
    rounds = [found for candidate in measured.values() for found in candidate["rounds"]]
    return {
        "model": display_name(model),
        "source": str(listed.source),
        "machine": msgspec.to_builtins(this_machine()),
        "num_threads": rounds[0]["num_threads"],
        "kept_in": str(listed.work) if listed.is_kept else None,
        "settings": {
            "batches": list(load.batches), "input_tokens": load.input_tokens,
            "output_tokens": load.output_tokens, "rounds": load.rounds,
            "quality": msgspec.to_builtins(quality, enc_hook=str),
            "reference_kv_dtype": REFERENCE_KV,
        },
        "candidates": rows,
        "fronts": [
            {"name": front.name, "axes": front.axes, "members": front.members(rows)}
            for front in fronts(load.batches[0])
        ],
    }  # fmt: skip


def _row(candidate: Candidate, found: Mapping[str, Any]) -> Row:
    rounds = found["rounds"]
    return {
        "name": candidate.name,
        "weights": candidate.weights.name,
        "kv_dtype": candidate.kv_dtype,
        "path": found["path"],
        "disk_bytes": found["disk_bytes"],
        "memory": _memory(rounds),
        "speed": _speeds(rounds),
        "text": found["text"],
        "humaneval": found["humaneval"],
        "fronts": [],
    }


def _memory(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a process held after its batches, and which part of it the formats explain."""
    weights, kv = rounds[0]["weight_bytes"], rounds[0]["kv_bytes"]
    resident = spread([found["resident_bytes"] for found in rounds])
    return {
        "resident_bytes": resident,
        "weight_bytes": weights,
        "kv_bytes": kv,
        "other_bytes": resident["median"] - weights - kv,
    }


def _speeds(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_batch: dict[int, list[Mapping[str, Any]]] = {}
    for found in rounds:
        for batch in found["batches"]:
            speed = batch["decode_tokens_per_s"]
            tpot = None if speed is None else batch["batch"] / speed
            by_batch.setdefault(batch["batch"], []).append({**batch, "tpot_s": tpot})
    return [
        {"batch": size, "rounds": len(found), **{name: _figure(found, name) for name in _FIGURES}}
        for size, found in by_batch.items()
    ]


def _figure(found: Sequence[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    values = [batch[name] for batch in found if batch[name] is not None]
    return spread(values) if values else None
