"""CallMeters: running totals over all calls that have ended."""

from __future__ import annotations

from paceline.measure.histogram import COUNTS, SECONDS, Histogram
from paceline.measure.ledger import RESIDUAL, Part
from paceline.server.calls import OUTCOMES, Call

_PARTS = (*(part.label for part in Part), RESIDUAL)
_REASONS = ("stop", "length", "abort", "error")


class CallMeters:
    """Totals over all finished calls. Latencies are those of calls that ended well."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(SECONDS)
        self.tpot_s = Histogram(SECONDS)
        self.e2e_s = Histogram(SECONDS)
        self.queue_s = Histogram(SECONDS)
        self.prefill_s = Histogram(SECONDS)
        self.decode_s = Histogram(SECONDS)
        self.inference_s = Histogram(SECONDS)
        self.prompt_tokens = Histogram(COUNTS)
        self.generation_tokens = Histogram(COUNTS)
        self.max_tokens = Histogram(COUNTS)
        self.n = Histogram(COUNTS)
        self.part_s: dict[tuple[str, ...], Histogram] = {
            (name,): Histogram(SECONDS) for name in _PARTS
        }
        self.wall_s: dict[tuple[str, ...], Histogram] = {
            (outcome,): Histogram(SECONDS) for outcome in OUTCOMES
        }
        self.part_total_s: dict[tuple[str, ...], float] = {
            (name, outcome): 0 for name in _PARTS for outcome in OUTCOMES
        }
        self.tokens: dict[tuple[str, ...], float] = {
            (kind, outcome): 0 for kind in ("prompt", "completion") for outcome in OUTCOMES
        }
        self.blame_s: dict[tuple[str, ...], float] = {
            (cause,): 0 for cause in ("prefill", "decode", "preemption")
        }
        self.embedding_s: dict[tuple[str, ...], Histogram] = {
            (outcome,): Histogram(SECONDS) for outcome in OUTCOMES
        }
        self.embedded_tokens: dict[tuple[str, ...], float] = {(outcome,): 0 for outcome in OUTCOMES}
        self.reasons: dict[tuple[str, ...], float] = {(reason,): 0 for reason in _REASONS}

    def observe(self, call: Call) -> None:
        """Count a call. Precondition: it has ended."""
        outcome = call.outcome
        if call.endpoint == "embeddings":  # apart: it has no first token, and none that follow
            self.embedding_s[outcome,].observe(call.wall_ns() / 1e9)
            self.embedded_tokens[outcome,] += call.num_embedded
            return
        wall_ns, ns = call.wall_ns(), call.parts()
        spent = {part.label: ns[part] / 1e9 for part in Part}
        spent[RESIDUAL] = (wall_ns - sum(ns)) / 1e9
        self.wall_s[outcome,].observe(wall_ns / 1e9)
        for name, seconds in spent.items():
            self.part_total_s[name, outcome] += seconds
        self.tokens["prompt", outcome] += call.prompt_tokens
        self.tokens["completion", outcome] += call.completion_tokens
        for ended in call.choices.values():
            assert ended.finish_reason is not None
            self.reasons[ended.finish_reason,] += 1
        self._observe_blame(call)
        if outcome == "ok":
            self.e2e_s.observe(wall_ns / 1e9)
            for name, seconds in spent.items():
                self.part_s[name,].observe(seconds)
            self._observe_answer(call)

    def _observe_blame(self, call: Call) -> None:
        last = call.last
        if last is not None and last.ledger is not None:
            ledger = last.ledger
            prefill = sum(ledger.blame.values())
            others = ledger.ns[Part.PREFILL_OTHERS] + ledger.ns[Part.DECODE_OTHERS]
            self.blame_s["prefill",] += prefill / 1e9
            self.blame_s["decode",] += (others - prefill) / 1e9
            self.blame_s["preemption",] += ledger.preempted_ns / 1e9
            if ledger.rejected_ns:
                lost_s = self.blame_s.get(("rejected_drafts",), 0.0)
                self.blame_s["rejected_drafts",] = lost_s + ledger.rejected_ns / 1e9

    def _observe_answer(self, call: Call) -> None:
        ttft_ns, last = call.ttft_ns, call.last
        if ttft_ns is not None:
            self.ttft_s.observe(ttft_ns / 1e9)
        self.n.observe(call.n)
        if call.max_tokens is not None:
            self.max_tokens.observe(call.max_tokens)
        for idx, ended in call.choices.items():
            if idx % call.n == 0:
                self.prompt_tokens.observe(ended.usage.prompt_tokens)
            self.generation_tokens.observe(ended.usage.completion_tokens)
            if ended.timings.tpot_s is not None:
                self.tpot_s.observe(ended.timings.tpot_s)
        if last is not None:
            timings = last.timings
            decode_s = (timings.tpot_s or 0.0) * (last.usage.completion_tokens - 1)
            prefill_s = timings.ttft_s - timings.queue_s
            self.queue_s.observe(timings.queue_s)
            self.prefill_s.observe(prefill_s)
            self.decode_s.observe(decode_s)
            self.inference_s.observe(prefill_s + decode_s)
