"""Calls, what is counted of them, and how it is told: metrics, spans, access log, trace."""

import json
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.speculation.stats import SpecStats
from paceline.engine.stats import EngineStats
from paceline.errors import ParameterError
from paceline.measure.histogram import SECONDS, Histogram
from paceline.measure.ledger import Ledger, Part
from paceline.measure.recorder import StepRecorder
from paceline.measure.work import StepWork
from paceline.server import calls as calls_module
from paceline.server.access_log import AccessLog
from paceline.server.calls import Call, CallLog
from paceline.server.meters import CallMeters
from paceline.server.metrics import Metrics, exposition
from paceline.server.spans import Spans
from paceline.server.timeline import describe
from paceline.server.trace import trace_pieces
from paceline.types import Delta, SamplingParams, Timings, Usage

MS = 1_000_000


@pytest.fixture
def clock(monkeypatch):
    """The calls' clock, in ms, moved by hand."""
    clock = SimpleNamespace(ms=0.0)
    fake = SimpleNamespace(monotonic_ns=lambda: int(clock.ms * MS), time=lambda: 1e9)
    monkeypatch.setattr(calls_module, "time", fake)
    return clock


def engine_ledger(begin_ms, **parts):
    ledger = Ledger(begin_ns=int(begin_ms * MS), mark_ns=int(begin_ms * MS), short_ns=0)
    for name, spent_ms in parts.items():
        ledger.spend(Part[name.upper()], ledger.mark_ns + int(spent_ms * MS))
    ledger.end_ns = ledger.mark_ns
    return ledger


def last_delta(ledger, *, tokens=3, reason="stop", tpot_s=0.01):
    return Delta(
        request_id="x", index=0, finish_reason=reason, ledger=ledger,
        usage=Usage(prompt_tokens=5, completion_tokens=tokens),
        timings=Timings(queue_s=0.002, ttft_s=0.012, tpot_s=tpot_s if tokens > 1 else None,
                        e2e_s=(ledger.end_ns - ledger.begin_ns) / 1e9),
    )  # fmt: skip


def make_call(clock, *, on_close=lambda call: None, n=1, stream=False, status=200, **end):
    """A call of 3 ms of front end, 32 in the engine, 1 of hand-over and 4 of sending."""
    start_ms = clock.ms
    call = Call(path="/v1/completions", begin_ns=int(start_ms * MS), on_close=on_close)
    call.id, call.request_id = f"cmpl-{start_ms:g}", f"req-{start_ms:g}"
    clock.ms += 1
    call.lap(Part.RECEIVE)
    clock.ms += 2
    call.lap(Part.PARSE)
    call.accepted(SamplingParams(n=n, max_tokens=9), num_prompts=1, is_stream=stream)
    arrival_ms = clock.ms
    for idx in range(n):
        ledger = engine_ledger(
            arrival_ms, queue_budget=2, prefill=8, prefill_others=2, decode=18 - idx, sample=2
        )
        first_ns = ledger.begin_ns + 12 * MS
        before = (ns if part < Part.DECODE else 0 for part, ns in enumerate(ledger.ns))
        ledger.first_text, ledger.first_text_ns = tuple(before), first_ns
        clock.ms = ledger.end_ns / MS + 1
        call.ended(idx, last_delta(ledger, **end))
    if stream:
        call.first_content_ns = int((arrival_ms + 14) * MS)
    clock.ms = arrival_ms + 37
    call.started(status)
    call.responded()
    return call


# ---- a call ----


def test_a_calls_parts_are_its_front_end_its_engine_and_its_way_out(clock):
    call = make_call(clock)
    assert call.figures()["parts_ms"] == {
        "receive": 1, "parse": 2, "queue_budget": 2, "prefill": 8, "prefill_others": 2,
        "decode": 18, "sample": 2, "handoff": 1, "send": 4, "residual": 0,
    }  # fmt: skip
    assert call.figures()["wall_ms"] == 40


def test_drafted_tokens_of_all_choices_are_told_where_there_are_any(clock):
    call = make_call(clock, n=2)
    assert "drafted_tokens" not in call.figures()
    for idx, (drafted, accepted) in enumerate(((7, 5), (4, 0))):
        timings = replace(call.choices[idx].timings, num_drafted=drafted, num_accepted=accepted)
        call.choices[idx] = replace(call.choices[idx], timings=timings)
    figures = call.figures()
    assert (figures["drafted_tokens"], figures["accepted_tokens"]) == (11, 5)


def test_a_call_of_several_choices_follows_the_one_that_ends_last(clock):
    call = make_call(clock, n=3)
    assert call.parts()[Part.DECODE] == 18 * MS
    assert call.completion_tokens == 9
    assert call.prompt_tokens == 5  # once, whatever n is


def test_ttft_is_to_the_first_content_written_or_made(clock):
    assert make_call(clock, stream=True).ttft_ns == (3 + 14) * MS
    assert make_call(clock, stream=False).ttft_ns == (3 + 12) * MS


def test_a_call_is_over_when_both_the_response_and_the_engine_are(clock):
    closed = []
    call = Call(path="/v1/completions", begin_ns=0, on_close=closed.append)
    call.accepted(SamplingParams(), num_prompts=1, is_stream=True)
    clock.ms = 5
    call.is_gone = True
    call.responded()
    assert closed == []
    clock.ms = 7
    call.ended(0, last_delta(engine_ledger(0, decode=6), reason="abort"))
    assert closed == [call]
    assert (call.outcome, call.end_ns) == ("aborted", 7 * MS)


def test_a_call_that_was_not_accepted_closes_without_its_choices(clock):
    closed = []
    call = Call(path="/v1/completions", begin_ns=0, on_close=closed.append)
    call.ended(0, last_delta(engine_ledger(0, decode=1), reason="abort"))
    clock.ms = 5
    call.started(503)
    call.responded()
    call.ended(1, last_delta(engine_ledger(0, decode=9), reason="abort"))
    assert closed == [call]
    assert (call.outcome, call.figures()["parts_ms"]["residual"]) == ("failed", 0)


@pytest.mark.parametrize(
    ("status", "reason", "is_gone", "outcome"),
    [
        (200, "stop", False, "ok"), (200, "length", False, "ok"), (200, "error", False, "failed"),
        (500, "error", False, "failed"), (503, "abort", False, "failed"),
        (200, "abort", False, "failed"), (200, "abort", True, "aborted"),
        (499, "abort", True, "aborted"), (200, "stop", True, "aborted"),
    ],
)  # fmt: skip
def test_the_outcome_says_whose_doing_it_was(clock, status, reason, is_gone, outcome):
    call = make_call(clock, status=status, reason=reason)
    call.is_gone = is_gone
    assert call.outcome == outcome


def test_a_refused_call_is_parsing_and_sending(clock):
    call = Call(path="/v1/completions", begin_ns=0, on_close=lambda call: None)
    clock.ms = 3
    call.started(400)
    clock.ms = 4
    call.responded()
    assert call.outcome == "refused"
    assert call.figures()["parts_ms"] == {"parse": 3, "send": 1, "residual": 0}


def test_phases_fill_the_call(clock):
    call = make_call(clock)
    names = [name for name, _, _ in call.phases()]
    assert names == ["http", "queue", "prefill", "decode", "send"]
    spans = [(begin, end) for _, begin, end in call.phases()]
    assert spans[0][0] == call.begin_ns
    assert spans[-1][1] == call.end_ns
    assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_log_of_calls_is_bounded_and_forgets_both_names(clock):
    log = CallLog(max_calls=3, max_choices=7)
    calls = [make_call(clock, n=n) for n in (1, 1, 1, 1, 3, 3)]
    for call in calls:
        log.add(call)
    assert list(log) == calls[-3:]
    assert log.find(calls[0].id) is None
    assert log.find(calls[0].request_id) is None
    assert log.find(calls[-1].id) is log.find(calls[-1].request_id) is calls[-1]


def test_a_repeated_request_id_means_the_later_call(clock):
    log = CallLog(max_calls=2)
    first, second, third = (make_call(clock) for _ in range(3))
    second.request_id = third.request_id = first.request_id
    for call in (first, second, third):
        log.add(call)
    assert log.find("req-0") is third


def test_memory_stays_flat_over_many_calls_and_steps(clock):
    log, meters = CallLog(max_calls=64), CallMeters()

    def work(count):
        for _ in range(count):
            call = make_call(clock)
            log.add(call)
            meters.observe(call)

    work(300)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    work(1000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 350_000  # 64 calls' worth of replaced objects, not a thousand's


# ---- metrics ----


def test_a_value_on_a_bound_counts_as_up_to_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.total) == ([2, 2, 1], 5, 14.0)


def test_buckets_begin_at_a_tenth_of_a_millisecond_and_grow_evenly():
    assert SECONDS[0] == 1e-4
    assert SECONDS[-1] > 600
    assert all(1.5 < b / a < 1.7 for a, b in pairwise(SECONDS))


def speculation_stats():
    stats = SpecStats.empty()
    stats.count([1, 2, 3], 2)
    stats.count([1, 2], 0)
    return stats


class IdleEngine:
    def __init__(self, speculation=None):
        self.speculation = speculation

    def stats(self):
        return EngineStats(
            num_running=2, num_waiting=3, num_live_blocks=25, num_blocks=100, num_cached_blocks=0,
            num_free_blocks=75, num_steps=0, num_prefix_queried=9, num_prefix_hit=5,
            num_preemptions=4, num_generated_tokens=5,
            speculation=self.speculation,
        )  # fmt: skip


def scrape(meters, recorder=None, engine=None):
    """{(name, values of the other labels by name): value} of everything but buckets."""
    metrics = Metrics(engine or IdleEngine(), recorder, meters, model="m")
    values = {}
    for family in text_string_to_metric_families(exposition([metrics]).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            assert labels.pop("engine") == "0"
            if not sample.name.endswith("_bucket"):
                values[sample.name, tuple(labels[k] for k in sorted(labels))] = sample.value
    return values


def test_speculation_is_counted_where_it_is_on_and_absent_where_it_is_off():
    assert not [name for name, _ in scrape(CallMeters()) if "spec_decode" in name]
    values = scrape(CallMeters(), engine=IdleEngine(speculation_stats()))
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    counted = [values[f"vllm:spec_decode_num_{name}", ()] for name in names]
    assert counted == [2, 5, 2]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [values.get((name, (str(place),))) for place in range(4)] == [1, 1, 0, None]


def test_the_names_that_gateways_know_are_there(clock):
    meters = CallMeters()
    meters.observe(make_call(clock))
    values = scrape(meters, StepRecorder())
    names = {name for name, _ in values}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
        "request_success_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_inference_time_seconds_count",
        "iteration_tokens_total_count", "request_time_per_output_token_seconds_count",
    ):  # fmt: skip
        assert f"vllm:{name}" in names
    assert values["vllm:kv_cache_usage_perc", ()] == 0.25


def test_a_call_lands_in_each_histogram_once(clock):
    meters = CallMeters()
    meters.observe(make_call(clock, stream=True))
    values = scrape(meters)
    assert values["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(0.017)
    assert values["vllm:e2e_request_latency_seconds_sum", ()] == pytest.approx(0.040)
    assert values["vllm:request_queue_time_seconds_sum", ()] == pytest.approx(0.002)
    assert values["vllm:request_prefill_time_seconds_sum", ()] == pytest.approx(0.010)
    assert values["vllm:request_decode_time_seconds_sum", ()] == pytest.approx(0.020)
    assert values["vllm:request_time_per_output_token_seconds_sum", ()] == pytest.approx(0.010)
    assert values["vllm:request_success_total", ("stop",)] == 1
    assert values["paceline:part_seconds_total", ("ok", "prefill")] == pytest.approx(0.008)
    assert {v for (name, _), v in values.items() if name.endswith("_count")} <= {0.0, 1.0}


def test_tpot_is_absent_for_one_token_and_not_zero(clock):
    meters = CallMeters()
    meters.observe(make_call(clock, tokens=1))
    assert scrape(meters)["vllm:request_time_per_output_token_seconds_count", ()] == 0
    assert make_call(clock, tokens=1).figures()["tpot_ms"] is None


def test_calls_that_did_not_end_well_have_their_label_and_no_place_in_the_latencies(clock):
    meters = CallMeters()
    meters.observe(make_call(clock, reason="error"))
    refused = Call(path="/v1/completions", begin_ns=int(clock.ms * MS), on_close=meters.observe)
    clock.ms += 1
    refused.started(400)
    refused.responded()
    values = scrape(meters)
    assert values["vllm:e2e_request_latency_seconds_count", ()] == 0
    assert values["paceline:request_seconds_count", ("failed",)] == 1
    assert values["paceline:request_seconds_count", ("refused",)] == 1
    assert values["paceline:tokens_total", ("completion", "failed")] == 3
    assert values["paceline:tokens_total", ("completion", "ok")] == 0


def test_the_parts_add_up_to_the_wall_time_for_each_outcome(clock):
    meters = CallMeters()
    for reason in ("stop", "error", "length"):
        meters.observe(make_call(clock, reason=reason, n=2))
    values = scrape(meters)
    for outcome in ("ok", "failed"):
        parts = sum(
            value for (name, labels), value in values.items()
            if name == "paceline:part_seconds_total" and labels[0] == outcome
        )  # fmt: skip
        assert parts == pytest.approx(values["paceline:request_seconds_sum", (outcome,)])


# ---- spans, access log, trace ----


def exported(call, name="text_completion m"):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    Spans(provider, model="m").write(call)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    return spans.pop(name), spans


def test_a_call_becomes_a_span_with_its_phases_below_it(clock):
    call = make_call(clock)
    root, phases = exported(call)
    assert root.end_time - root.start_time == 40 * MS
    assert {name: (s.end_time - s.start_time) / MS for name, s in phases.items()} == {
        "http": 3, "queue": 2, "prefill": 10, "decode": 20, "send": 5
    }  # fmt: skip
    assert all(span.parent.span_id == root.context.span_id for span in phases.values())
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == 5
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.attributes["gen_ai.response.id"] == call.id
    assert root.attributes["paceline.prefill_ms"] == 8
    assert "error.type" not in root.attributes


def test_a_span_tells_the_model_that_was_asked_for_from_the_one_that_answered(clock):
    answered = make_call(clock)
    answered.model = "smollm2"
    answered.asked_for("gpt-4o-mini")
    root, _ = exported(answered, "text_completion gpt-4o-mini")
    assert root.attributes["gen_ai.request.model"] == "gpt-4o-mini"
    assert root.attributes["gen_ai.response.model"] == "smollm2"
    assert (describe(answered)["asked_model"], describe(answered)["model"]) == (
        "gpt-4o-mini", "smollm2"
    )  # fmt: skip


@pytest.mark.parametrize(("asked", "told"), [("other", "other"), ("x" * 300, "x" * 200), (7, None)])
def test_a_call_that_no_model_answered_names_none_in_its_span(clock, asked, told):
    call = Call(path="/v1/completions", begin_ns=0, on_close=lambda call: None, model="smollm2")
    call.asked_for(asked)
    call.started(404)
    call.responded()
    root, _ = exported(call, f"text_completion {told or 'smollm2'}")
    assert root.attributes.get("gen_ai.request.model") == told
    assert "gen_ai.response.model" not in root.attributes
    assert describe(call)["asked_model"] == told


def test_a_span_joins_its_callers_trace(clock):
    call = make_call(clock, reason="error")
    call.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    root, _ = exported(call)
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert root.attributes["error.type"] == "failed"
    assert not root.status.is_ok


def test_the_access_log_has_a_line_of_json_for_each_call(clock, tmp_path):
    path = tmp_path / "access.jsonl"
    log = AccessLog(str(path))
    for _ in range(2):
        log.write(make_call(clock))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["cmpl-0", "cmpl-40"]
    assert lines[0]["parts_ms"]["prefill"] == 8
    assert lines[0]["status"] == 200


def test_an_access_log_that_cannot_be_written_is_refused_by_name(tmp_path):
    with pytest.raises(ParameterError, match=r"nowhere.*--access-log"):
        AccessLog(str(tmp_path / "nowhere" / "log"))


def test_calls_that_overlap_get_rows_of_their_own(clock):
    def call_at(begin_ms, end_ms):
        call = Call(path="/v1/completions", begin_ns=begin_ms * MS, on_close=lambda call: None)
        clock.ms = end_ms
        call.started(400)
        call.responded()
        return call

    def rows_of(calls):
        pieces = list(trace_pieces([], calls, {"name": "x"}))
        trace = json.loads(b"".join(pieces))
        assert trace["otherData"] == {"paceline": {"name": "x"}, "zero_ns": 0}
        events = trace["traceEvents"]
        return len(pieces), [e["tid"] for e in events if e["name"] == "text_completion refused"]

    few = [call_at(0, 10), call_at(5, 15), call_at(11, 20)]
    assert rows_of(few) == (2, [1, 2, 1])
    num_pieces, rows = rows_of(few + [call_at(100 + i, 101 + i) for i in range(400)])
    assert num_pieces > 3
    assert rows == [1, 2, 1, *[1] * 400]


def test_the_dashboard_asks_for_metrics_that_there_are(clock):
    meters = CallMeters()
    meters.observe(make_call(clock))
    recorder = StepRecorder(StepWork(
        macs_per_token=1, macs_per_logit_row=1, macs_per_key=1, weight_bytes=1,
        kv_bytes_per_token=1, layers_of_window=((0, 1),),
    ))  # fmt: skip
    metrics = Metrics(IdleEngine(), recorder, meters, model="m")
    metrics.read_bandwidth = metrics.int8_macs_s = 1e9
    names = {
        sample.name
        for family in text_string_to_metric_families(exposition([metrics]).decode())
        for sample in family.samples
    } | {"paceline:step_phase_seconds_total"}  # there after the first step
    dashboard = (Path(__file__).parents[2] / "dashboards" / "paceline.json").read_text()
    asked = set(re.findall(r"(?:vllm|paceline):\w+", dashboard))
    assert len(asked) > 15
    assert asked <= names
