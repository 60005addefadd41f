"""Summary: a run's figures, as the JSON schema in docs/bench.md names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.exchange import OUTCOMES
from paceline.bench.probe import Probe
from paceline.bench.recorder import Columns, Recorder
from paceline.bench.statistics import share_figure, summarise

_MS = 1e3
_MAX_ERRORS = 10
Column = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What the machine costs while it runs; None where the user gave no figure."""

    per_hour: float | None = None
    watts: float | None = None

    def summary(self, tokens_per_s: float) -> dict[str, float]:
        """Return the price of a million output tokens at that rate."""
        figures: dict[str, float] = {}
        if tokens_per_s <= 0:
            return figures
        hours = 1e6 / tokens_per_s / 3600
        if self.per_hour is not None:
            figures["cost_per_million_output_tokens"] = self.per_hour * hours
        if self.watts is not None:
            figures["wh_per_million_output_tokens"] = self.watts * hours
        return figures


def summarise_run(recorder: Recorder, probe: Probe, price: Price) -> dict[str, Any]:
    """Return the summary of a run that has ended."""
    together = recorder.together()
    duration_s = recorder.window.duration_s
    throughput = _throughput(recorder, together, duration_s)
    num_unsent = recorder.num_unsent
    num_due = len(together.outcome) + num_unsent
    return {
        "window_s": duration_s,
        "offered_per_s": num_due / duration_s if duration_s else 0.0,
        "requests": {
            **_requests(together),
            "unsent": num_unsent,
            "warmup": recorder.num_warmup,
        },
        "errors": _errors(recorder),
        "latency_ms": _latency(together),
        "server_ms": _phases(together),
        "throughput": throughput,
        "concurrency": {
            "mean": recorder.open_s / duration_s if duration_s else 0.0,
            "peak": recorder.peak_open,
        },
        "tokens": {
            "input": summarise(together.of("input_tokens")),
            "output": summarise(together.of("output_tokens")),
            "output_from": dict(recorder.token_sources),
            "cached_input": recorder.cached_tokens,
            "unread_events": recorder.num_unread,
        },
        "goodput": _goodput(together, recorder, "", duration_s, num_unsent),
        "classes": {
            kind: {
                "requests": _requests(columns),
                "latency_ms": _latency(columns),
                "goodput": _goodput(columns, recorder, kind, duration_s),
            }
            for kind, columns in sorted(recorder.classes.items())
        },
        "client": probe.summary(_sent_lags(together), num_unsent),
        "price": price.summary(throughput["output_tokens_per_s"]),
    }


def _errors(recorder: Recorder) -> list[dict[str, Any]]:
    """Return the most frequent kinds, and all others as one: the counts sum to the failures."""
    kinds = recorder.errors.most_common()
    shown = [{"what": what, "count": count} for what, count in kinds[:_MAX_ERRORS]]
    if rest := kinds[_MAX_ERRORS:]:
        what = f"{len(rest)} other kinds: --log FILE has them all"
        shown.append({"what": what, "count": sum(count for _, count in rest)})
    return shown


def _requests(columns: Columns) -> dict[str, int]:
    """Count by outcome; they sum to `measured`."""
    counts: dict[str, int] = {outcome: columns.num(outcome) for outcome in OUTCOMES}
    return {
        "measured": len(columns.outcome),
        **counts,
        "empty": columns.num_empty,
        "checked": columns.num_checked,
        "valid": columns.num_valid,
    }


def _latency(columns: Columns) -> dict[str, Any]:
    """Figures of complete answers alone: failures are counted, not timed."""
    names = ("ttft", "ttfo", "tpot", "e2e", "connect")
    figures = {name: summarise(columns.of(name), _MS) for name in names}
    return {
        **figures,
        "e2e_per_token": summarise(_quotients(columns.of("e2e"), columns.of("output_tokens")), _MS),
        "itl": columns.gaps.summary(_MS),
    }


def _quotients(above: Column, below: Column) -> Column:
    """Return above / below, NaN where that is no number above 0."""
    quotients: Column = np.full(above.shape, np.nan)
    np.divide(above, below, out=quotients, where=below > 0)
    return quotients


def _phases(columns: Columns) -> dict[str, Any]:
    """Return the phases that the server told, those that take the longest on average first."""
    told = {name: summarise(values, _MS) for name, values in sorted(columns.phases.items())}
    return dict(sorted(told.items(), key=lambda item: -item[1]["mean"]["value"]))


def _throughput(recorder: Recorder, together: Columns, duration_s: float) -> dict[str, Any]:
    """Rates in the window; those of the input are None where no request's is known.

    `user_tokens_per_s` is what one reader gets after the first text, by request: 1 / TPOT.
    """
    tpot = together.of("tpot")
    seconds = duration_s or 1.0
    num_input = recorder.input_tokens
    total = None if num_input is None else num_input + recorder.output_tokens
    return {
        "requests_per_s": recorder.num_completed / seconds,
        "input_tokens_per_s": None if num_input is None else num_input / seconds,
        "output_tokens_per_s": recorder.output_tokens / seconds,
        "peak_output_tokens_per_s": recorder.peak_tokens_per_s,
        "user_tokens_per_s": summarise(_quotients(np.ones_like(tpot), tpot)),
        "total_tokens_per_s": None if total is None else total / seconds,
        "input_tokens": num_input,
        "output_tokens": recorder.output_tokens,
        "output_tokens_of": {name: num for name, num in recorder.tokens_of.items() if num},
    }


def _goodput(
    columns: Columns, recorder: Recorder, kind: str, duration_s: float, num_unsent: int = 0
) -> dict[str, Any]:
    """Judge the requests: every one that ended counts, whatever became of it.

    Those that were due and never sent are misses: no class has them, as nobody made them.
    Requests that the run's end cut are left out of `attainment` and count as missed in
    `attainment_if_cut_missed`, the lower bound.
    """
    met, missed, cut = (columns.met.count(verdict) for verdict in (1, 0, -1))
    missed += num_unsent
    judged = met + missed
    limits = recorder.objectives.limits if not kind else {kind: recorder.objectives.of(kind)}
    return {
        "objectives_ms": {
            name or "all": {metric: limit * _MS for metric, limit in metrics.items()}
            for name, metrics in limits.items()
            if metrics
        },
        "met": met,
        "missed": missed,
        "unsent": num_unsent,
        "cut": cut,
        "attainment": share_figure(met, judged).as_dict() if judged else None,
        "attainment_if_cut_missed": met / (judged + cut) if judged + cut else None,
        "requests_per_s": met / duration_s if duration_s else 0.0,
    }


def _sent_lags(columns: Columns) -> Sequence[float]:
    return columns.values["lag"]
