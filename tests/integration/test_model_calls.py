"""Models of Triton's python backend that call one of ours from inside the server (BLS)."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.testing.served import Serve, is_running, shared_memory
from tests.testing.served_requests import ask
from tests.testing.servers import PATIENCE_S, wait_until
from tests.testing.triton_models import NUM_ROWS, flat_answer, write_flat

pytestmark = pytest.mark.triton

NUM_CLIENTS, NUM_REQUESTS = 4, 25
CALLER = """
import numpy
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "item")) for request in requests]

    def answer(self, item):
        price = pb_utils.Tensor("price", numpy.ones(item.shape()[0], numpy.float32))
        called = pb_utils.InferenceRequest(
            model_name="flat", requested_output_names=["score"], inputs=[item, price]
        ).exec()
        if called.has_error():
            return pb_utils.InferenceResponse(error=called.error())
        score = pb_utils.get_output_tensor_by_name(called, "score")
        return pb_utils.InferenceResponse([pb_utils.Tensor("score", score.as_numpy())])
"""
CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "item" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "score" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`flat`, and `caller`, which asks it."""
    write_flat(tmp_path / "repository" / "flat" / "1")
    version = tmp_path / "repository" / "caller" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(CALLER, encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(CONFIG, encoding="utf-8")
    return tmp_path / "repository"


def ask_often(client: Any, rng: np.random.Generator, num_requests: int) -> None:
    for _ in range(num_requests):
        items = rng.integers(0, NUM_ROWS, int(rng.integers(1, 9)))
        answer = ask(client, "caller", {"item": items}).as_numpy("score")
        np.testing.assert_array_equal(answer, flat_answer(items, np.ones(len(items), np.float32)))


def test_calls_of_other_models_are_answered_until_the_stop(serve: Serve, repository: Path) -> None:
    """Each caller gets the answer to its own request, also while the server stops, which leaves nothing."""
    served = serve(repository)
    family = served.family()
    asked = threading.Barrier(NUM_CLIENTS + 1, timeout=PATIENCE_S)

    def ask_on(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with served.grpc_client() as client:
            ask_often(client, rng, NUM_REQUESTS)
            asked.wait()
            with pytest.raises(InferenceServerException):
                ask_often(client, rng, sys.maxsize)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask_on, seed) for seed in range(NUM_CLIENTS)]
        asked.wait()
        assert served.stop() == 0
        for client in clients:
            client.result()
    wait_until(lambda: not any(map(is_running, family)), "the end of all processes")
    assert shared_memory(served.process.pid) == []
