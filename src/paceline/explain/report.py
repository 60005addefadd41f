"""Explanation: what bounds each percentile, how far it is from the floor, what would help."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.explain.causes import Causes, Finding, Metric
from paceline.explain.facts import Parts, ServerFacts
from paceline.explain.levers import LEVERS
from paceline.explain.predictions import Curves, curves_of, predicted
from paceline.explain.proposal import Change, Predict, Proposal
from paceline.explain.situation import Situation

_LEAST_GAIN = 0.05  # of a percentile: less is not worth an advice
_LEAST_LOSS = 0.03
_MANY_REPEATS = 0.25  # of all prompt tokens
_FAR, _NEAR_MS = 2.0, 20.0  # by which factor a model is off that is worth a note, and least ms
_NOTABLE = 0.3  # of a percentile: a client's part that is told


class Bound(Struct, frozen=True, kw_only=True):
    """A percentile of a metric: its value, what bounds it, and the least it could be."""

    metric: Metric
    percentile: int
    value_ms: float
    bound: str  # queue, KV memory, compute, bandwidth, interference, overhead, other models …
    cause: str  # the largest of `causes`
    causes: Causes
    overhead: Parts  # of `causes`: the parts of the ledger that it is made of
    floor_ms: float | None
    ratio: float | None
    model_ms: float | None  # what the simulation of the run as it was makes of it
    num_calls: int


class Expected(Struct, frozen=True, kw_only=True):
    """A percentile before and after a change, by the model of the steps."""

    metric: Metric
    percentile: int
    before_ms: float
    after_ms: float


class Advice(Struct, frozen=True, kw_only=True):
    """A lever, and what is expected of it; only percentiles that it moves are told."""

    lever: str
    change: Change
    why: str
    price: str
    gain: float  # the largest relative one
    whole_gain: float  # of the mean call, first token to last
    expected: tuple[Expected, ...]


class Explanation(Struct, frozen=True, kw_only=True):
    """All that `paceline explain` says."""

    source: str
    server: ServerFacts | None
    num_calls: int
    num_failed: int
    num_steps: int
    repeated_share: float  # of prompt tokens: as an earlier prompt began, and computed anew
    are_sizes_guesses: bool  # of what is advised: steps of one or two sizes ran
    bounds: tuple[Bound, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]


def explain(situation: Situation) -> Explanation:
    facts = situation.facts
    share = situation.repeated_share
    return Explanation(
        source=facts.source,
        server=facts.server,
        num_calls=facts.num_calls,
        num_failed=facts.num_failed,
        num_steps=len(facts.steps),
        repeated_share=share,
        are_sizes_guesses=_are_sizes_guesses(situation),
        bounds=tuple(_bound(finding, situation) for finding in situation.findings),
        advice=tuple(advise(situation)),
        notes=tuple(_notes(situation, share)),
    )


def advise(situation: Situation) -> list[Advice]:
    """Return the levers that move a percentile down enough, the largest gain of a call first.

    A change that makes the mean call longer is no advice, but for a trade: who streams beside
    long prompts, or waits for memory, is bound by the others, and they are the ones who pay.
    What changes answers comes after what does not, and what no option does, another file, last.
    """
    found: list[tuple[tuple[bool, bool, float], Advice]] = []
    curves = curves_of(situation.facts.calls)
    for name, lever in LEVERS.items():
        proposal = lever(situation)
        if proposal is not None:
            predict = proposal.effect(situation)
            advice = _advice(name, proposal, predict, situation.findings, curves)
            worth = advice.whole_gain > 0 or proposal.is_trade
            if worth and advice.gain >= _LEAST_GAIN:
                order = (not advice.change, proposal.is_lossy, -advice.whole_gain)
                found.append((order, advice))
    return [advice for _, advice in sorted(found, key=lambda entry: entry[0])]


def _advice(
    name: str, proposal: Proposal, predict: Predict, found: Sequence[Finding], curves: Curves
) -> Advice:
    expected = []
    prediction = predicted(predict, curves)
    gain = 0.0
    for finding in found:
        if finding.value_ms <= 0:
            continue
        after_ms = prediction.at(finding.metric, finding.percentile)
        change = 1 - after_ms / finding.value_ms
        gain = max(gain, change)
        if change >= _LEAST_GAIN or change <= -_LEAST_LOSS:
            expected.append(
                Expected(
                    metric=finding.metric,
                    percentile=finding.percentile,
                    before_ms=finding.value_ms,
                    after_ms=after_ms,
                )
            )
    return Advice(
        lever=name,
        change=proposal.change,
        why=proposal.text,
        price=proposal.price,
        gain=gain,
        whole_gain=prediction.whole_gain,
        expected=tuple(expected),
    )


def _bound(finding: Finding, situation: Situation) -> Bound:
    machine = situation.machine
    floor_ms = None if machine is None else machine.floor_ms(finding)
    return Bound(
        metric=finding.metric,
        percentile=finding.percentile,
        value_ms=finding.value_ms,
        bound=_bound_name(finding, situation),
        cause=finding.main,
        causes=finding.causes,
        overhead=finding.overhead,
        floor_ms=floor_ms,
        ratio=None if not floor_ms else finding.value_ms / floor_ms,
        model_ms=_simulated_ms(finding, situation),
        num_calls=finding.num_calls,
    )


def _simulated_ms(finding: Finding, situation: Situation) -> float | None:
    simulated = situation.simulated
    return None if simulated is None else simulated.at(finding.metric, finding.percentile)


_BOUNDS = {
    "others_prefill": "interference", "others_decode": "interference", "queue": "queue",
    "kv_memory": "KV memory", "overhead": "overhead", "reader": "slow reader",
    "upload": "slow sender", "prefix": "compute", "drafts": "compute", "models": "other models",
}  # fmt: skip


def _bound_name(finding: Finding, situation: Situation) -> str:
    if finding.main in _BOUNDS:
        return _BOUNDS[finding.main]
    if finding.main == "decode":
        return "bandwidth"  # a stream's own token is one row: it waits for the weights
    return "compute" if _is_large(finding, situation) else "bandwidth"


def _is_large(finding: Finding, situation: Situation) -> bool:
    """Whether the chunks of a prompt take longer by their tokens than by being steps at all.

    What the prefix cache had is in no chunk, and a policy may make them smaller than the budget.
    """
    steps = situation.steps
    if steps is None:
        return True
    computed = max(finding.prompt_tokens - finding.cached_tokens, 1.0)
    return min(computed, situation.usual_chunk) * steps.token_s >= steps.base_s


def _notes(situation: Situation, repeated_share: float) -> list[str]:
    notes = []
    if repeated_share >= _MANY_REPEATS:
        prefill = max(
            (f.share("prefill") for f in situation.findings if f.metric == "ttft"), default=0.0
        )
        notes.append(
            f"{repeated_share:.0%} of the prompt tokens repeat how an earlier prompt began (a "
            f"system prompt, a conversation), and are computed anew: computing the prompt is up to "
            f"{prefill:.0%} of the TTFT"
        )
    for cause, text in (
        ("reader", "clients that read slowly hold their streams up; the server cannot help"),
        ("upload", "clients send their requests slowly; the server cannot help"),
    ):
        share = max((finding.share(cause) for finding in situation.findings), default=0.0)
        if share >= _NOTABLE:
            notes.append(f"{text} (up to {share:.0%} of a percentile)")
    for finding in situation.findings:
        model_ms = _simulated_ms(finding, situation)
        if model_ms is not None and _is_far(model_ms, finding.value_ms):
            notes.append(
                f"{finding.metric.upper()} p{finding.percentile} of this run is {model_ms:,.0f} ms "
                f"by the model of the steps and {finding.value_ms:,.0f} ms as measured: what it "
                "predicts is rough"
            )
            break
    if _are_sizes_guesses(situation):
        notes.append(f"steps of one or two sizes ran, so by how much a change would help is a "
                     f"guess{_remedy(situation)}")  # fmt: skip
    if situation.facts.percentiles:
        notes.append(
            "a summary has the percentiles of each part by itself: what a slow call is made of is "
            "an estimate; the lines of `paceline bench --log FILE` have the calls"
        )
    if situation.machine is None:
        notes.append(
            "floors are not known: --model names the server's model file, where the server runs on "
            "this machine"
        )
    if situation.server is None:
        notes.append(
            "what was recorded does not tell the server's options: levers need a server's address "
            "or a file of `paceline trace`"
        )
    return notes


def _are_sizes_guesses(situation: Situation) -> bool:
    """Whether the steps that ran tell too little of those that a change would lead to."""
    if situation.server is None or not situation.facts.steps:
        return False
    return situation.steps is None or situation.steps.are_guesses


def _remedy(situation: Situation) -> str:
    """Return how to have the cost of steps of every size; nothing where no command measures it."""
    server = situation.server
    if server is None or server.block_size != EngineConfig().block_size:
        return ""
    options = ""
    if server.num_threads != server.machine_threads:
        options += f" --threads {server.num_threads}"
    options += f" --kv-dtype {server.kv_dtype}"  # always: the usual one depends on the CPU
    return (
        f"; `paceline roofline MODEL{options}` measures them on the server's machine once, and "
        "`paceline explain --model MODEL` then knows them"
    )


def _is_far(model_ms: float, measured_ms: float) -> bool:
    low, high = sorted((model_ms, measured_ms))
    return high > _FAR * low and high - low > _NEAR_MS
