"""OpenTelemetry spans for the phases of requests, below those that Triton makes where its own tracing is on.

A request that Triton traces has its parent span in `request.trace().get_context()`. OpenTelemetry's environment
variables say where to export to; if none is set, nothing is imported, and nothing is done per request.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from inference_session.execution.phases import OnPhase, Phase, ignore_phase

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
"""`otlp`, `console`, `none`, or the name under which a package offers another one."""
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}

_log = logging.getLogger(__name__)


class RequestTracer:
    """Makes spans of the requests that Triton traces."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("hotrow")
        self._extract = TraceContextTextMapPropagator().extract

    @contextmanager
    def of(self, requests: Sequence[Any]) -> Iterator[OnPhase]:
        """What notes the phases of these requests (`pb_utils.InferenceRequest`), which are answered together.

        Each one that is traced gets a span for each phase that began in the meantime, ending where the next one begins.
        """
        parents = [json.loads(context) for request in requests if (context := request.trace().get_context())]
        if not parents:
            yield ignore_phase
            return
        phases: list[tuple[Phase, int]] = []
        try:
            yield lambda phase: phases.append((phase, time.time_ns()))
        finally:
            ends = [begin for _, begin in phases[1:]] + [time.time_ns()]
            for parent in parents:
                self._export(parent, phases, ends, {"hotrow.batch_requests": len(requests)})

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _export(
        self,
        parent: Mapping[str, str],
        phases: Sequence[tuple[Phase, int]],
        ends: Sequence[int],
        attributes: Mapping[str, int],
    ) -> None:
        context = self._extract(parent)
        for (phase, begin), end in zip(phases, ends, strict=True):
            span = self._tracer.start_span(f"hotrow {phase}", context, start_time=begin, attributes=attributes)
            span.end(end)


def create_tracing() -> RequestTracer | None:
    """The tracing that the environment asks for; None if it asks for none, or for an unavailable one (logged)."""
    has_endpoint = any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
    name = os.environ.get(EXPORTER_VARIABLE) or ("otlp" if has_endpoint else "none")
    if name == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    except ImportError:
        _log.warning("Tracing is off: OpenTelemetry is not installed (pip install 'hotrow[tracing]')")
    except (ValueError, LookupError) as error:
        _log.warning("Tracing is off: %s=%s: %s", EXPORTER_VARIABLE, name, error)
    else:
        return RequestTracer(provider)
    return None


def _exporter(name: str) -> SpanExporter:
    if name == "otlp":
        protocol = next(filter(None, map(os.environ.get, _PROTOCOL_VARIABLES)), "http/protobuf")
        if protocol not in _OTLP:
            raise ValueError(f"unknown protocol {protocol!r}; allowed: {', '.join(_OTLP)}")
        name = _OTLP[protocol]
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise LookupError(f"no installed package provides the exporter {name!r}")
    exporter: SpanExporter = next(iter(found)).load()()
    return exporter
