"""Causes: the parts of a ledger, gathered by what would change them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from paceline.explain.facts import CallFacts, Facts, Parts

Metric = Literal["ttft", "tpot"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot")
PERCENTILES = (50, 95, 99)
Causes = dict[str, float]  # milliseconds by cause

# cause -> what it is, in a sentence's words
WORDS = {
    "prefill": "computing its own prompt",
    "decode": "computing its own tokens",
    "drafts": "guessing tokens ahead, and checking them",
    "others_prefill": "the prompts of others in its steps",
    "others_decode": "the tokens of others in its steps",
    "prefix": "waiting for another call that computes the same beginning",
    "queue": "waiting for a seat or for room in a step",
    "models": "other models of the server: their steps, and waiting until its own is loaded",
    "kv_memory": "waiting for KV memory, and computing again what a preemption threw away",
    "overhead": "what is done around the computing",
    "reader": "a client that reads slowly",
    "upload": "a client that sends slowly",
}
_CAUSE_OF = {
    "prefill": "prefill", "decode": "decode", "prefill_others": "others_prefill",
    "decode_others": "others_decode", "queue_budget": "queue", "queue_kv": "kv_memory",
    "queue_prefix": "prefix", "recompute": "kv_memory", "draft": "drafts",
    "verify": "drafts", "send": "reader", "receive": "upload", "load": "models", "turn": "models",
}  # fmt: skip
_NEIGHBOURS = 0.05  # of all calls: as many as a percentile's causes are averaged over


class Finding(Struct, frozen=True, kw_only=True):
    """One percentile of one metric, and what it is made of; the causes sum to its value."""

    metric: Metric
    percentile: int
    value_ms: float
    causes: Causes  # the largest first
    overhead: Parts  # the parts of the ledger that the overhead is made of, the largest first
    num_calls: int  # that have the metric
    prompt_tokens: float  # means over the calls near the percentile
    cached_tokens: float  # of the prompts, found in the prefix cache
    repeated_tokens: float  # of the prompts, as an earlier one began, and not found
    context_tokens: float

    @property
    def output_tokens(self) -> float:
        return max(2 * (self.context_tokens - self.prompt_tokens), 1.0)

    @property
    def main(self) -> str:
        return next(iter(self.causes), "overhead")

    def share(self, cause: str) -> float:
        return self.causes.get(cause, 0.0) / self.value_ms if self.value_ms else 0.0


def findings(facts: Facts) -> list[Finding]:
    """Return each percentile of each metric that the calls have."""
    found = []
    for metric in METRICS:
        for percentile in PERCENTILES:
            whole = facts.percentiles.get(percentile)
            finding = find(facts.calls if whole is None else [whole], metric, percentile)
            if finding is not None:
                found.append(finding if whole is None else _of(facts.num_calls, finding))
    return found


def _of(num_calls: int, finding: Finding) -> Finding:
    return replace(finding, num_calls=num_calls)


def find(calls: Sequence[CallFacts], metric: Metric, percentile: int) -> Finding | None:
    """Return what a percentile is made of; None where no call has the metric.

    Its value is that of the call at its rank (the nearest); its causes are the mean of the calls
    about it, scaled to the value.
    """
    ranked = _ranked(calls, metric)
    return _at(ranked, metric, percentile) if ranked else None


def curve(calls: Sequence[CallFacts], metric: Metric) -> list[Finding]:
    """Return the percentiles 0 … 100 of a metric; none where no call has it."""
    ranked = _ranked(calls, metric)
    return [_at(ranked, metric, percentile) for percentile in range(101)] if ranked else []


def _ranked(calls: Iterable[CallFacts], metric: Metric) -> list[tuple[float, CallFacts]]:
    value_of = _VALUES[metric]
    return sorted(
        ((value, call) for call in calls if (value := value_of(call)) is not None),
        key=lambda pair: pair[0],
    )


def _at(ranked: Sequence[tuple[float, CallFacts]], metric: Metric, percentile: int) -> Finding:
    rank = round(percentile / 100 * (len(ranked) - 1))
    reach = int(_NEIGHBOURS * len(ranked) / 2)
    near = [call for _, call in ranked[max(rank - reach, 0) : rank + reach + 1]]
    value = ranked[rank][0]
    summed: Parts = defaultdict(float)
    for call in near:
        for name, ms in _PARTS[metric](call).items():
            summed[name] += ms
    total = sum(summed.values())
    scale = value / total if total else 0.0
    overhead = {name: ms for name, ms in summed.items() if cause_of(name) == "overhead"}
    return Finding(
        metric=metric,
        percentile=percentile,
        value_ms=value,
        causes=_scaled(gather(summed), scale),
        overhead=_scaled(overhead, scale),
        num_calls=len(ranked),
        prompt_tokens=_mean(call.prompt_tokens for call in near),
        cached_tokens=_mean(call.cached_tokens for call in near),
        repeated_tokens=_mean(call.recomputed_tokens for call in near),
        context_tokens=_mean(call.prompt_tokens + call.answer_tokens / 2 for call in near),
    )


def ttft_parts(call: CallFacts) -> Parts:
    return _for_a_seat(call, call.first_parts)


def tpot_parts(call: CallFacts) -> Parts:
    """Return the parts of a token after the first. Others' part is divided by the call's blame."""
    after = {
        name: max(ms - call.first_parts.get(name, 0.0), 0.0) for name, ms in call.parts.items()
    }
    others = after.get("decode_others", 0.0)
    in_first = call.parts.get("prefill_others", 0.0)
    of_prefill = min(max(call.others_prefill_ms - in_first, 0.0), others)
    after["decode_others"] = others - of_prefill
    after["prefill_others"] = after.get("prefill_others", 0.0) + of_prefill
    num_gaps = max(call.answer_tokens - 1, 1)
    return _for_a_seat(call, {name: ms / num_gaps for name, ms in after.items()})


def _for_a_seat(call: CallFacts, parts: Parts) -> Parts:
    """Return parts in which computing again is the queue's, where memory was not what lacked.

    Who is preempted for memory waits for it; others had to leave their seat, or found none.
    """
    if not parts.get("recompute") or call.parts.get("queue_kv"):
        return parts
    queue_ms = parts.get("queue_budget", 0.0) + parts["recompute"]
    return {**parts, "recompute": 0.0, "queue_budget": queue_ms}


def gather(parts: Parts) -> Causes:
    """Return the milliseconds of each cause."""
    causes: Causes = defaultdict(float)
    for name, ms in parts.items():
        causes[cause_of(name)] += ms
    return dict(causes)


def cause_of(part: str) -> str:
    """Return the cause that a part belongs to; what is nobody's is overhead."""
    return _CAUSE_OF.get(part, "overhead")


_VALUES: dict[Metric, Callable[[CallFacts], float | None]] = {
    "ttft": lambda call: call.ttft_ms,
    "tpot": lambda call: call.tpot_ms,
}
_PARTS: dict[Metric, Callable[[CallFacts], Parts]] = {"ttft": ttft_parts, "tpot": tpot_parts}


def _scaled(values: dict[str, float], scale: float) -> dict[str, float]:
    """Return those above nothing, times `scale`, the largest first."""
    in_order = sorted(values.items(), key=lambda item: -item[1])
    return {name: ms * scale for name, ms in in_order if ms > 0}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
