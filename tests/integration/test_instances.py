"""Several instances of one model: each a process, with the same answers and one set of metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client

from inference_session.version_directory.session_file import read_spec
from tests.testing.served import Serve, Served, metric
from tests.testing.servers import wait_until
from tests.testing.triton_models import ctr_answer, write_ctr
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton

NUM_INSTANCES, NUM_CLIENTS, NUM_REQUESTS = 2, 4, 25


@pytest.fixture
def served(serve: Serve, tmp_path: Path) -> Served:
    """A server whose model has several instances."""
    version = tmp_path / "repository" / "ctr" / "1"
    write_ctr(version)
    (version.parent / "config.pbtxt").unlink()
    write_model_config(version, read_spec(version), "ctr", num_instances=NUM_INSTANCES)
    return serve(tmp_path / "repository")


def ask(served: Served, seed: int) -> None:
    """Send requests from one client, and compare each answer."""
    rng = np.random.default_rng(seed)
    with served.grpc_client() as client:
        for _ in range(NUM_REQUESTS):
            ids, dense = rng.integers(0, 50, (3, 3)), rng.random((3, 2), np.float32)
            tensors = []
            for name, array, datatype in (("ids", ids, "INT64"), ("dense", dense, "FP32")):
                tensors.append(grpc_client.InferInput(name, list(array.shape), datatype))
                tensors[-1].set_data_from_numpy(array)
            found = client.infer("ctr", tensors).as_numpy("OUTPUT0")
            np.testing.assert_allclose(found, ctr_answer(ids, dense), rtol=1e-5)


def test_instances_share_the_requests_and_the_counters(served: Served) -> None:
    """All answer rightly, also after a load that replaces them, and every request is counted once."""
    assert len(served.stubs("ctr")) == NUM_INSTANCES
    line = 'hotrow_requests_total{model="ctr",version="1"}'
    for turn in range(2):
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            list(threads.map(lambda seed: ask(served, seed), range(NUM_CLIENTS)))
        expected = (turn + 1) * NUM_CLIENTS * NUM_REQUESTS
        wait_until(lambda n=expected: metric(served, line) == n, f"{expected} requests counted")
        with served.grpc_client() as client:
            (served.repository / "ctr" / "1" / "touched").touch()
            client.load_model("ctr")
        wait_until(lambda: len(served.stubs("ctr")) == NUM_INSTANCES, "the replaced processes have ended")
