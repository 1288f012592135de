"""Spans of phases, looked at where they are exported to."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from triton_backend.backend.tracing import ENDPOINT_VARIABLES, EXPORTER_VARIABLE, RequestTracer, create_tracing

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


@dataclass(frozen=True)
class Request:
    """As Triton's: it may know a span of the server's."""

    span_id: int | None
    sampled: bool = True

    def trace(self) -> Request:
        return self

    def get_context(self) -> str | None:
        if self.span_id is None:
            return None
        return json.dumps({"traceparent": f"00-{TRACE_ID:032x}-{self.span_id:016x}-{self.sampled:02x}"})


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider)


def described(span: ReadableSpan) -> tuple[str, int, int]:
    """Name, and the ids of its trace and parent."""
    assert span.parent is not None
    return span.name, span.parent.trace_id, span.parent.span_id


def test_each_traced_request_gets_a_span_for_each_phase(tracing: RequestTracer, exporter: InMemorySpanExporter) -> None:
    """Below Triton's span of it, one where the other ends, also if the batch failed and was computed again."""
    phases = ("check", "look-up", "network", "look-up", "network", "answer")
    with tracing.of([Request(1), Request(None), Request(3)]) as on_phase:
        for phase in phases:
            on_phase(phase)

    spans = exporter.get_finished_spans()
    assert [described(span) for span in spans] == [
        (f"hotrow {phase}", TRACE_ID, span_id) for span_id in (1, 3) for phase in phases
    ]
    for span, following in itertools.pairwise(spans[: len(phases)]):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time == following.start_time
    assert {dict(span.attributes or {})["hotrow.batch_requests"] for span in spans} == {3}


def test_what_is_not_traced_makes_no_span(tracing: RequestTracer, exporter: InMemorySpanExporter) -> None:
    """Neither requests that Triton does not trace, nor those whose client has decided against it."""
    for request in (Request(None), Request(1, sampled=False)):
        with tracing.of([request]) as on_phase:
            on_phase("check")
    assert not exporter.get_finished_spans()


def test_spans_are_made_of_what_fails(tracing: RequestTracer, exporter: InMemorySpanExporter) -> None:
    """The last phase that began is the last that is shown."""

    def fail() -> None:
        with tracing.of([Request(1)]) as on_phase:
            on_phase("check")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [span.name for span in exporter.get_finished_spans()] == ["hotrow check"]


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({}, None),
        ({EXPORTER_VARIABLE: "none", ENDPOINT_VARIABLES[1]: "http://127.0.0.1:1"}, None),
        ({"OTEL_SDK_DISABLED": "TRUE", EXPORTER_VARIABLE: "otlp"}, None),
        ({EXPORTER_VARIABLE: "odd"}, "no installed package provides the exporter 'odd'"),
        ({EXPORTER_VARIABLE: "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "odd"}, "unknown protocol 'odd'; allowed: "),
    ],
)
def test_without_an_exporter_nothing_is_traced(
    variables: dict[str, str], warning: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If none is requested; if one is requested but not available, it is logged, and the model serves."""
    for name in (*ENDPOINT_VARIABLES, EXPORTER_VARIABLE, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert create_tracing() is None
    assert (warning or "") in caplog.text
    assert any(record.name == "triton_backend.backend.tracing" for record in caplog.records) == bool(warning)


def test_an_endpoint_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry's own packages have it, OTLP is then spoken."""
    monkeypatch.delenv(EXPORTER_VARIABLE, raising=False)
    monkeypatch.setenv(ENDPOINT_VARIABLES[1], "http://127.0.0.1:1")
    tracing = create_tracing()

    assert tracing is not None
    tracing.close()
