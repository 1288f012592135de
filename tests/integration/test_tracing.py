"""A real server with Triton's tracing on, and a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.testing.served import Serve
from tests.testing.servers import wait_until
from tests.testing.triton_models import write_ctr

TRACE_ID, CLIENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = {f"hotrow {stage}" for stage in ("check", "look-up", "network", "answer")}
Span = tuple[str, str, str, str]
"""Name, trace, its own id, its parent's."""

pytestmark = pytest.mark.triton


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    """Collects spans in its attribute `spans`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.spans += _of_json(body) if "json" in self.headers["Content-Type"] else _of_protobuf(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.spans = []  # type: ignore[attr-defined]
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
    arrays = {"ids": np.ones((2, 3), np.int64), "dense": np.ones((2, 2), np.float32)}
    tensors = []
    for (name, array), datatype in zip(arrays.items(), ("INT64", "FP32"), strict=True):
        tensors.append(grpc_client.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    with served.grpc_client() as client:
        client.infer("ctr", tensors, headers={"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"})

    def spans() -> list[Span]:
        """Of this trace: the launcher may itself send requests to a server that it finds slow. Each once: spans
        that are confirmed too late are exported again.
        """
        return list(dict.fromkeys(span for span in collector.spans if span[1] == TRACE_ID))  # type: ignore[attr-defined]

    wait_until(lambda: {"ctr", *STAGES} <= {name for name, *_ in spans()}, "the spans of Triton and ours")
    (of_model,) = [span for span in spans() if span[0] == "ctr"]
    ours = [span for span in spans() if span[0] in STAGES]
    assert {parent for *_, parent in ours} == {of_model[2]}
    assert len(ours) == len(STAGES)
