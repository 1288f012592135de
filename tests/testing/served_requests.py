"""Requests to a server, and what it has counted of them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.testing.served import Served
from tests.testing.servers import PATIENCE_S, wait_until

IDS: NDArray[np.int64] = np.array([[1, 2, 3], [0, 0, 49]])
DENSE: NDArray[np.float32] = np.array([[0.5, 0.25], [1, -1]], np.float32)


def ask(
    client: Any, model: str, arrays: Mapping[str, NDArray[Any]], outputs: list[str] | None = None, **options: Any
) -> Any:
    """One request over gRPC or HTTP, whichever the client speaks."""
    module = tritonclient.grpc if "grpc" in type(client).__module__ else tritonclient.http
    tensors = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    wanted = [module.InferRequestedOutput(name) for name in outputs] if outputs else None
    return client.infer(model, tensors, outputs=wanted, **options)


def post(served: Served, model: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """POST raw bytes; the status and the parsed answer."""
    url = f"http://{served.http}/v2/models/{model}/infer"
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310  a server of ours
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}")


def counters(served: Served, **labels: str) -> dict[str, float]:
    """The hotrow_* metrics that have these labels, by name."""
    with urllib.request.urlopen(served.metrics) as page:  # noqa: S310  a page of ours
        lines = page.read().decode().splitlines()
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith("hotrow_") and all(w in line for w in wanted)]
    return {name.partition("{")[0]: float(value) for name, value in rows}


def settled(served: Served, model: str) -> dict[str, float]:
    """The counters of a model that is loaded once, when they have caught up with what Triton has counted.

    Triton counts a request a moment after its answer: use `counted_since` for requests that were just answered.
    """
    with served.grpc_client() as client:
        (stats,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    asked = sum(int(stats["inference_stats"][how].get("count", 0)) for how in ("success", "fail"))
    wait_until(lambda: counters(served, model=model)["hotrow_requests_total"] >= asked, "all requests to be counted")
    return counters(served, model=model)


def counted_since(served: Served, model: str, before: Mapping[str, float], num_requests: int) -> dict[str, float]:
    """How much the counters of a model have grown since `before`, when they include this many more requests."""

    def are_counted() -> bool:
        return counters(served, model=model)["hotrow_requests_total"] >= before["hotrow_requests_total"] + num_requests

    wait_until(are_counted, f"{num_requests} requests to be counted")
    return {name: value - before[name] for name, value in counters(served, model=model).items()}


def is_unregistered(grpc: Any) -> bool:
    """Unregister all regions; Triton refuses for a moment after an answer, while it still holds the request."""
    try:
        grpc.unregister_system_shared_memory()
    except InferenceServerException:
        return False
    return True
