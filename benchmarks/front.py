"""Measures the cost of `hotrow serve --front`: the same requests to one server, through nginx and directly.

    python benchmarks/front.py

One client sends one sample after another over gRPC, then over HTTP; rounds are interleaved, medians of rounds shown.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tritonclient.grpc
import tritonclient.http
from serving import serve, tensors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.testing.triton_models import write_ctr
from triton_backend.launcher.server import TritonServer

NUM_ROUNDS = 7
NUM_REQUESTS = 1000
INPUTS = {"ids": np.array([[1, 2, 3]]), "dense": np.zeros((1, 2), np.float32)}


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        write_ctr(Path(folder) / "ctr" / "1")
        with serve(Path(folder), front=True) as server:
            report(measure(server))


def measure(server: TritonServer) -> dict[tuple[str, str], list[float]]:
    """Median latencies of rounds in ms, by protocol and way."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    clients: dict[Literal["grpc", "http"], Any] = {"grpc": tritonclient.grpc, "http": tritonclient.http}
    for _ in range(NUM_ROUNDS):
        for protocol, module in clients.items():
            inner, outer = server.options.listens_at(protocol)[1], server.options.port_of(protocol)
            for way, port in (("direct", inner), ("front", outer)):
                with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
                    found[protocol, way].append(median_latency(client, module))
    return found


def median_latency(client: Any, module: Any) -> float:
    """Median latency of consecutive requests, in ms."""
    inputs, latencies = tensors(module, INPUTS), []
    for _ in range(NUM_REQUESTS):
        begin = time.perf_counter()
        client.infer("ctr", inputs)
        latencies.append(1000 * (time.perf_counter() - begin))
    return statistics.median(latencies)


def report(found: dict[tuple[str, str], list[float]]) -> None:
    """Print a line per protocol."""
    for protocol in ("grpc", "http"):
        direct, front = (statistics.median(found[protocol, way]) for way in ("direct", "front"))
        print(f"{protocol}  direct {direct:.2f} ms  front {front:.2f} ms  more {front - direct:.2f} ms")


if __name__ == "__main__":
    main()
