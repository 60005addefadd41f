"""Spans: each call as an OpenTelemetry span with its phases below it (extra `otel`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.errors import ParameterError
from paceline.measure.ledger import Part
from paceline.server.calls import Call

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_PROVIDER = "paceline"


def otlp_provider() -> TracerProvider:
    """Return a provider that sends spans where the OTEL_EXPORTER_OTLP_* variables say."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ParameterError(
            "--otel needs the OpenTelemetry SDK: pip install 'paceline[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": _PROVIDER}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Spans:
    """Writes the spans of a call when it has ended, with the times that its ledger has."""

    def __init__(self, provider: TracerProvider, *, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("paceline.server")
        self._propagator = TraceContextTextMapPropagator()
        self._provider = provider
        self._model = model

    def write(self, call: Call) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        unix_ns = time.time_ns() - time.monotonic_ns()  # of the monotonic clock's zero
        parent = self._propagator.extract({"traceparent": call.traceparent})
        span = self._tracer.start_span(
            f"{call.endpoint} {call.asked_model or call.model or self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=unix_ns + call.begin_ns,
            attributes=self._attributes(call),
        )
        if call.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR, call.error))
        context = set_span_in_context(span, parent)
        for name, begin_ns, end_ns in call.phases():
            child = self._tracer.start_span(name, context=context, start_time=unix_ns + begin_ns)
            child.end(unix_ns + end_ns)
        span.end(unix_ns + call.end_ns)

    def close(self) -> None:
        """Send what is still to be sent."""
        shutdown = getattr(self._provider, "shutdown", None)  # of the SDK's; the API has none
        if shutdown is not None:
            shutdown()

    def _attributes(self, call: Call) -> dict[str, Any]:
        parts = call.parts()
        wanted = {
            "gen_ai.operation.name": call.endpoint,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": call.asked_model or None,
            "gen_ai.response.model": call.answering_model or None,
            "gen_ai.response.id": call.id or None,
            "gen_ai.request.max_tokens": call.max_tokens,
            "gen_ai.request.temperature": call.temperature if call.num_choices else None,
            "gen_ai.request.choice.count": call.n if call.n > 1 else None,
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.completion_tokens,
            "gen_ai.response.finish_reasons": [
                ended.finish_reason for _, ended in sorted(call.choices.items())
            ],
            "http.response.status_code": call.status or None,
            "error.type": None if call.outcome == "ok" else call.outcome,
            "paceline.ttft_ms": None if call.ttft_ns is None else call.ttft_ns / 1e6,
            **{f"paceline.{part.label}_ms": parts[part] / 1e6 for part in Part if parts[part]},
        }
        return {name: value for name, value in wanted.items() if value is not None}
