"""Metrics: what /metrics tells. `docs/metrics.md` has the exact definitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from paceline.measure.histogram import Histogram
from paceline.measure.ledger import Part
from paceline.server.meters import CallMeters

if TYPE_CHECKING:
    from paceline.engine.speculation.stats import SpecStats
    from paceline.engine.stats import EngineStats
    from paceline.measure.recorder import StepRecorder

_T = TypeVar("_T")
Labelled = Mapping[tuple[str, ...], _T]  # values of the labels beyond model_name and engine


class Source(Protocol):
    """An engine, or what stands for those that a model had."""

    def stats(self) -> EngineStats: ...


class Metrics:
    """The families of one model. Nothing is computed before somebody asks for it."""

    def __init__(
        self,
        engine: Source,
        recorder: StepRecorder | None,
        calls: CallMeters,
        *,
        model: str,
    ) -> None:
        self.is_loaded, self.num_loads = True, 1
        self.read_bandwidth = 0.0  # of the machine, bytes a second; 0: not measured
        self.int8_macs_s = 0.0  # likewise; 0: `paceline roofline` has not run here
        self.recorder = recorder
        self._engine, self._calls = engine, calls
        self._names, self._values = ["model_name", "engine"], [model, "0"]

    def collect(self) -> Iterator[Metric]:
        """Yield all families (the protocol of prometheus_client's collectors)."""
        yield from self._state()
        yield from self._answers()
        yield from self._ledgers()
        if self.recorder is not None:
            yield from self._steps(self.recorder)

    def _state(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences that hold KV memory.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait for it.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", stats.kv_use),
            ("paceline:kv_blocks_live", "KV blocks in use.", stats.num_live_blocks),
            ("paceline:kv_blocks_cached", "KV blocks kept for reuse.", stats.num_cached_blocks),
            ("paceline:kv_blocks", "KV blocks in all.", stats.num_blocks),
            ("paceline:model_loaded", "1 while the model is in memory.", self.is_loaded),
        ):
            yield self._gauge(name, help_text, value)
        for name, help_text, total in (
            ("paceline:model_loads", "Times the model was loaded.", self.num_loads),
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("vllm:generation_tokens", "Tokens chosen.", stats.num_generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queried),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit),
            ("paceline:kv_tier_blocks_stored", "KV blocks stored.", stats.num_blocks_stored),
            ("paceline:kv_tier_blocks_restored", "And restored.", stats.num_blocks_restored),
            (
                "paceline:forced_tokens",
                "Tokens chosen without a step, for a structure left no choice.",
                stats.num_forced_tokens,
            ),
        ):
            yield self._counter(name, help_text, {(): total})
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)

    def _speculation(self, stats: SpecStats) -> Iterator[Metric]:
        for name, help_text, total in (
            ("drafts", "Drafts checked.", stats.num_drafts),
            ("draft_tokens", "Drafted tokens checked.", stats.num_drafted),
            ("accepted_tokens", "Drafted tokens that were right.", stats.num_accepted),
        ):
            yield self._counter(f"vllm:spec_decode_num_{name}", help_text, {(): total})
        accepted: Labelled[float] = {
            (str(position),): count
            for position, count in enumerate(stats.accepted_at)
            if stats.drafted_at[position]
        }
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were right, by their place in the draft.",
            accepted,
            "position",
        )

    def _answers(self) -> Iterator[Metric]:
        calls = self._calls
        yield self._counter(
            "vllm:request_success", "Choices by how they ended.", calls.reasons, "finished_reason"
        )
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "First byte read to first content.", calls.ttft_s),
            ("request_time_per_output_token_seconds", "Mean gap of an answer.", calls.tpot_s),
            ("e2e_request_latency_seconds", "First byte read to last written.", calls.e2e_s),
            ("request_queue_time_seconds", "Arrival to first step.", calls.queue_s),
            ("request_prefill_time_seconds", "First step to first token.", calls.prefill_s),
            ("request_decode_time_seconds", "First token to last token.", calls.decode_s),
            ("request_inference_time_seconds", "First step to last token.", calls.inference_s),
            ("request_prompt_tokens", "Tokens of a prompt.", calls.prompt_tokens),
            ("request_generation_tokens", "Tokens of a choice.", calls.generation_tokens),
            ("request_params_max_tokens", "max_tokens, where given.", calls.max_tokens),
            ("request_params_n", "n.", calls.n),
        ):
            yield self._histogram(f"vllm:{name}", help_text, {(): histogram})

    def _ledgers(self) -> Iterator[Metric]:
        calls = self._calls
        yield self._histogram(
            "paceline:request_seconds", "Wall time of calls.", calls.wall_s, "outcome"
        )
        yield self._histogram(
            "paceline:request_part_seconds", "Time of good calls by part.", calls.part_s, "part"
        )
        yield self._counter(
            "paceline:part_seconds", "Time of all calls by part.", calls.part_total_s,
            "part", "outcome",
        )  # fmt: skip
        yield self._counter("paceline:tokens", "Tokens of calls.", calls.tokens, "kind", "outcome")
        yield self._histogram(
            "paceline:embedding_seconds", "Time of calls that embed.", calls.embedding_s, "outcome"
        )
        yield self._counter(
            "paceline:embedding_tokens", "Tokens that were embedded.", calls.embedded_tokens,
            "outcome",
        )  # fmt: skip
        yield self._counter(
            "paceline:lost_seconds", "Time that others cost.", calls.blame_s, "cause"
        )

    def _steps(self, recorder: StepRecorder) -> Iterator[Metric]:
        counters = recorder.counters
        num_prompt = counters.tokens[Part.PREFILL]
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts computed.", {(): num_prompt})
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Gap between two tokens.", {(): counters.gap_s}
        )
        yield self._histogram(
            "vllm:iteration_tokens_total", "Tokens of a step.", {(): counters.num_tokens}
        )
        yield self._histogram(
            "paceline:step_seconds", "Duration of a step.", {(): counters.duration_s}
        )
        phases: Labelled[float] = {
            (name,): ns / 1e9 for name, ns in counters.phase_ns.copy().items()
        }
        yield self._counter("paceline:step_phase_seconds", "Time of steps.", phases, "phase")
        tokens: dict[tuple[str, ...], float] = {
            (kind.label,): counters.tokens[kind]
            for kind in (Part.PREFILL, Part.RECOMPUTE, Part.DECODE)
        }
        if counters.tokens[Part.VERIFY]:
            tokens[Part.VERIFY.label,] = counters.tokens[Part.VERIFY]
        yield self._counter("paceline:step_tokens", "Tokens that steps computed.", tokens, "kind")
        yield self._gauge(
            "paceline:machine_read_bytes_per_second",
            "Read bandwidth of this machine, once a scrape has found the engine idle.",
            self.read_bandwidth or None,
        )
        yield self._gauge(
            "paceline:machine_int8_macs_per_second",
            "Int8 multiply-adds a second that this machine reaches at best, once paceline roofline "
            "has measured it for as many threads.",
            self.int8_macs_s or None,
        )
        if counters.work is not None:
            read: Labelled[float] = {
                ("weights",): counters.weight_bytes,
                ("kv",): counters.kv_bytes,
            }
            yield self._counter("paceline:read_bytes", "Bytes that steps read.", read, "kind")
            yield self._counter("paceline:macs", "Multiply-adds of steps.", {(): counters.macs})

    def _gauge(self, name: str, help_text: str, value: float | None) -> Metric:
        """Return a family; one whose value is not known has its help and no sample."""
        family = GaugeMetricFamily(name, help_text, labels=self._names)
        if value is not None:
            family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, help_text: str, values: Labelled[float], *labels: str) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[*self._names, *labels])
        for label_values, value in values.items():
            family.add_metric([*self._values, *label_values], value)
        return family

    def _histogram(
        self, name: str, help_text: str, values: Labelled[Histogram], *labels: str
    ) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=[*self._names, *labels])
        for label_values, histogram in values.items():
            family.add_metric([*self._values, *label_values], _buckets(histogram), histogram.total)
        return family


class _Together:
    """A collector of several models: all samples of a family stand together, as the format asks."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for family in model.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


def exposition(models: Sequence[Metrics]) -> bytes:
    """Return what Prometheus is told of these models."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Together(models))
    return generate_latest(registry)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return (upper bound, values up to it); the last bound is +Inf."""
    bounds: Iterable[str] = (*map(str, histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
