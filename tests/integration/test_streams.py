"""gRPC streams (ModelStreamInfer), each with several requests under way: each request gets its own answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray

from tests.testing.served import Serve, Served
from tests.testing.servers import PATIENCE_S
from tests.testing.triton_models import NUM_ROWS, ctr_answer, write_ctr

pytestmark = [pytest.mark.triton, pytest.mark.slow]

NUM_STREAMS, NUM_REQUESTS, NUM_UNDER_WAY = 4, 4000, 20
NUM_QUESTIONS = 100
"""Of each stream, which asks them in turn: more than it has under way at once."""


def question(stream: int, number: int) -> tuple[list[Any], NDArray[np.float32]]:
    """The inputs of a request, and their answer."""
    rng = np.random.default_rng((stream, number))
    num_samples = int(rng.integers(1, 65))
    ids, dense = rng.integers(0, NUM_ROWS, (num_samples, 3)), rng.random((num_samples, 2), np.float32)
    return [tensor("ids", ids, "INT64"), tensor("dense", dense, "FP32")], ctr_answer(ids, dense)


def tensor(name: str, array: NDArray[Any], kind: str) -> Any:
    """An input of a request."""
    made = tritonclient.grpc.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def ask_in_a_stream(served: Served, stream: int) -> list[str]:
    """Send all requests of one stream; what was wrong with their answers."""
    room = threading.Semaphore(NUM_UNDER_WAY)
    faults: list[str] = []
    questions = [question(stream, number) for number in range(NUM_QUESTIONS)]

    def check(result: Any, error: Exception | None) -> None:
        if error is not None:
            faults.append(str(error))
        else:
            number = int(result.get_response().id)
            _, expected = questions[number % NUM_QUESTIONS]
            found = result.as_numpy("OUTPUT0")
            if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-5):
                faults.append(f"request {number} of stream {stream} has a wrong answer")
        room.release()

    with served.grpc_client() as client:
        client.start_stream(check)
        for number in range(NUM_REQUESTS):
            if not room.acquire(timeout=PATIENCE_S):
                return [*faults, "no answer"]
            tensors, _ = questions[number % NUM_QUESTIONS]
            client.async_stream_infer("ctr", tensors, request_id=str(number))
        if not all(room.acquire(timeout=PATIENCE_S) for _ in range(NUM_UNDER_WAY)):
            faults.append("no answer")
        client.stop_stream()
    return faults


def test_each_request_gets_its_own_answer(serve: Serve, tmp_path: Path) -> None:
    """Triton 24.10 as it comes frees a request that is still in use: keys changed, and the server died."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    served = serve(tmp_path / "repository")
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        faults = [*threads.map(lambda stream: ask_in_a_stream(served, stream), range(NUM_STREAMS))]

    assert faults == [[]] * NUM_STREAMS
    assert served.stop() == 0
