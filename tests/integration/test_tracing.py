"""A real server with Triton's tracing on, and a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.testing.served import Serve
from tests.testing.servers import PATIENCE_S
from tests.testing.triton_models import write_ctr

CLIENT_SPAN_ID = "b7ad6b7169203331"
STAGES = {f"hotrow {stage}" for stage in ("check", "look-up", "network", "answer")}
Span = tuple[str, str, str, str]
"""Name, trace, its own id, its parent's."""
EXPORT_S = 15
"""Longer than an exporter tries to deliver a span, by default 10 seconds."""

pytestmark = pytest.mark.triton


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    """Collects spans in its attribute `spans`."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.extend(_of_json(body) if "json" in self.headers["Content-Type"] else _of_protobuf(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.spans = spans  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _of_json(body: bytes) -> list[Span]:
    """Triton's own."""
    return [
        (span["name"], span["traceId"], span["spanId"], span.get("parentSpanId", ""))
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _of_protobuf(body: bytes) -> list[Span]:
    """Ours."""
    return [
        (span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_stages_are_shown_below_tritons_spans(
    serve: Serve, collector: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trace of the client: its span, Triton's of the model below it, and the four stages below that."""
    url = f"http://127.0.0.1:{collector.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    write_ctr(tmp_path / "repository/ctr/1")
    settings = ["mode=opentelemetry", "rate=1", "level=TIMESTAMPS"]
    settings += [f"opentelemetry,url={url}/v1/traces", "opentelemetry,bsp_schedule_delay=100"]
    flags = [flag for setting in settings for flag in ("--trace-config", setting)]
    served = serve(tmp_path / "repository", "--", *flags)
    arrays: dict[str, Any] = {"ids": np.ones((2, 3), np.int64), "dense": np.ones((2, 2), np.float32)}
    tensors = []
    for (name, array), datatype in zip(arrays.items(), ("INT64", "FP32"), strict=True):
        tensors.append(grpc_client.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    spans: list[Span] = collector.spans  # type: ignore[attr-defined]
    with served.grpc_client() as client:
        of_trace = _complete_trace(spans, lambda headers: client.infer("ctr", tensors, headers=headers))

    (of_model,) = [span for span in of_trace if span[0] == "ctr"]
    ours = [span for span in of_trace if span[0] in STAGES]
    assert {parent for *_, parent in ours} == {of_model[2]}
    assert len(ours) == len(STAGES)


def _complete_trace(spans: Sequence[Span], ask: Callable[[dict[str, str]], object]) -> list[Span]:
    """The spans of the first request of which all have come, each once: spans that are confirmed late come twice.

    Exporters drop spans that are not confirmed within their timeout, which happens on a busy machine. Then another
    request is traced. (The launcher may itself send requests to a server that it finds slow: those are other traces.)
    """
    begin, number = time.monotonic(), 0
    while True:
        number += 1
        trace, asked = f"{number:032x}", time.monotonic()
        ask({"traceparent": f"00-{trace}-{CLIENT_SPAN_ID}-01"})
        while time.monotonic() < asked + EXPORT_S:
            found = list(dict.fromkeys(span for span in list(spans) if span[1] == trace))
            if {"ctr", *STAGES} <= {name for name, *_ in found}:
                return found
            time.sleep(0.02)
        assert time.monotonic() < begin + PATIENCE_S, f"spans of {number} requests: {spans}"
