"""Load on a Triton server: clients in processes of their own, each with one request at a time.

    python benchmarks/client_load.py grpc|http URL MODEL REQUESTS.npz SECONDS

`measure_load` starts them all, lets them begin together, and adds up what they report. REQUESTS.npz has an array
[requests, …] for each input.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tritonclient.grpc
import tritonclient.http
from serving import tensors

Protocol = Literal["grpc", "http"]
_CLIENTS: dict[str, Any] = {"grpc": tritonclient.grpc, "http": tritonclient.http}


def measure_load(
    model: str,
    url: str,
    requests: Sequence[dict[str, Any]],
    *,
    num_clients: int,
    seconds: float,
    protocol: Protocol = "grpc",
) -> dict[str, float]:
    """Figures of clients that send these requests in turn: `requests/s` of all, `p50` in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requests.npz"
        arrays: dict[str, Any] = {name: np.stack([request[name] for request in requests]) for name in requests[0]}
        np.savez(file, **arrays)
        command = [sys.executable, __file__, protocol, url, model, str(file), str(seconds)]
        clients = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(num_clients)
        ]
        lines = [[client.stdout.readline() for client in clients]]  # type: ignore[union-attr]  # that they are ready
        for client in clients:
            client.stdin.write("go\n")  # type: ignore[union-attr]
            client.stdin.flush()  # type: ignore[union-attr]
        lines.append([client.communicate()[0] for client in clients])
    if any(client.returncode for client in clients):
        raise SystemExit(f"clients of {model} failed")
    times = [json.loads(line) for line in lines[1]]
    return {
        "requests/s": sum(map(len, times)) / seconds,
        "p50": statistics.median(each for own in times for each in own),
    }


def ask(module: Any, url: str, model: str, file: str, seconds: float) -> None:
    """One client: says that it is ready, waits to be told to begin, prints microseconds per answered request."""
    with np.load(file) as arrays, module.InferenceServerClient(url) as client:
        requests = [dict(zip(arrays, values, strict=True)) for values in zip(*arrays.values(), strict=True)]
        sent = [tensors(module, request) for request in requests]
        for each in sent:
            client.infer(model, each)
        print("ready", flush=True)
        sys.stdin.readline()
        times: list[float] = []
        begin = now = time.perf_counter()
        while now - begin < seconds:
            client.infer(model, sent[len(times) % len(sent)])
            before, now = now, time.perf_counter()
            times.append(1e6 * (now - before))
    print(json.dumps(times))


if __name__ == "__main__":
    ask(_CLIENTS[sys.argv[1]], sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
