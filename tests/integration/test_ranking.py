"""Requests that give their context once, on a real server: over every protocol, joined, and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.utils.shared_memory as system_memory
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from inference_session.importers.onnx import import_onnx
from tests.testing.ranking import CONTEXT, ITEMS, USERS, random_keys, small_ranker
from tests.testing.served import Served, start
from tests.testing.served_requests import ask, counters, is_unregistered
from tests.testing.servers import PATIENCE_S, wait_until
from triton_backend.repository.config_writer import write_model_config

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def ranker(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with one model whose user and clicks are its context."""
    folder = tmp_path_factory.mktemp("ranker")
    onnx.save(small_ranker(), folder / "model.onnx")
    repository = folder / "repository"
    report = import_onnx(folder / "model.onnx", repository, "ranker", context=CONTEXT)
    write_model_config(report.version_dir, report.spec, "ranker")
    served = start(repository)
    yield served
    served.close()


def scores(inputs: Mapping[str, NDArray[Any]], counts: list[int]) -> NDArray[np.float64]:
    """The expected answers."""
    users = USERS[inputs["user"]].astype(float) + ITEMS[inputs["clicks"]].astype(float).sum(axis=1)
    owners = np.repeat(np.arange(len(counts)), counts)
    return (users[owners] * ITEMS[inputs["item"]]).sum(axis=1, keepdims=True)


def assert_alike(answer: Any, wanted: NDArray[np.float64], output: str = "score") -> None:
    """Equal within rounding."""
    np.testing.assert_allclose(answer.as_numpy(output), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_context_is_sent_once(ranker: Served, protocol: str) -> None:
    """One context for all candidates; several with CANDIDATES; as many as candidates, as clients that tile send."""
    with ranker.http_client() if protocol == "http" else ranker.grpc_client() as client:
        inputs = random_keys(1, 500)
        assert_alike(ask(client, "ranker", inputs), scores(inputs, [500]), "OUTPUT0")
        inputs = random_keys(3, 10)
        counts = np.array([7, 0, 3], np.int32)
        assert_alike(ask(client, "ranker", {**inputs, "CANDIDATES": counts}), scores(inputs, [7, 0, 3]))
        inputs = random_keys(4, 4)
        assert_alike(ask(client, "ranker", inputs), scores(inputs, [1] * 4))
        assert_alike(ask(client, "ranker", {**inputs, "CANDIDATES": np.ones(4, np.int32)}), scores(inputs, [1] * 4))
        inputs = random_keys(1, 0)
        assert ask(client, "ranker", inputs).as_numpy("score").shape == (0, 1)


def test_shared_memory(ranker: Served) -> None:
    """Inputs of different first dimensions out of one region."""
    import tritonclient.grpc as triton

    arrays = random_keys(1, 30)
    num_bytes = sum(array.nbytes for array in arrays.values())
    with ranker.grpc_client() as client:
        handle = system_memory.create_shared_memory_region("ranker", "/hotrow_test_ranker", num_bytes)
        try:
            client.register_system_shared_memory("ranker", "/hotrow_test_ranker", num_bytes)
            tensors, offset = [], 0
            for name, array in arrays.items():
                system_memory.set_shared_memory_region(handle, [array], offset=offset)
                tensor = triton.InferInput(name, array.shape, "INT64")
                tensor.set_shared_memory("ranker", array.nbytes, offset=offset)
                tensors.append(tensor)
                offset += array.nbytes
            assert_alike(client.infer("ranker", tensors), scores(arrays, [30]))
            wait_until(lambda: is_unregistered(client), "Triton to let go of the region")
        finally:
            system_memory.destroy_shared_memory_region(handle)


def test_bad_requests_harm_no_other(ranker: Served) -> None:
    """Of requests that come together, those with contradictory numbers are refused; the error says what was found."""

    def send(seed: int) -> str:
        inputs = random_keys(1, 20 + seed, seed)
        with ranker.grpc_client() as client:
            if seed % 3:
                assert_alike(ask(client, "ranker", inputs, client_timeout=PATIENCE_S), scores(inputs, [20 + seed]))
                return ""
            with pytest.raises(InferenceServerException) as error:
                ask(client, "ranker", {**inputs, "CANDIDATES": np.array([5], np.int32)}, client_timeout=PATIENCE_S)
            return str(error.value)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(send, range(24)))
    assert all("has the sum 5, expected" in message for message in found[::3])


def test_contexts_and_candidates_are_counted(ranker: Served) -> None:
    """On Triton's metrics page."""
    labels = {"model": "ranker", "version": "1"}
    wait_until(lambda: "hotrow_contexts_total" in counters(ranker, **labels), "metrics of contexts")
    with ranker.grpc_client() as client:
        before = counters(ranker, **labels)
        ask(client, "ranker", random_keys(1, 11, seed=99))

    def counted() -> bool:
        after = counters(ranker, **labels)
        grown = [after[name] - before[name] for name in ("hotrow_contexts_total", "hotrow_candidates_total")]
        return grown[0] >= 1 and grown[1] >= 11

    wait_until(counted, "one context with 11 candidates")


def test_the_configuration_says_how_requests_look(ranker: Served) -> None:
    """Clients see full dims, and that CANDIDATES may be left out."""
    text = Path(ranker.repository, "ranker", "config.pbtxt").read_text(encoding="utf-8")
    assert "max_batch_size: 0" in text
    assert "optional: true" in text
    with ranker.grpc_client() as client:
        names = [tensor.name for tensor in client.get_model_metadata("ranker").inputs]
    assert names == ["user", "clicks", "item", "CANDIDATES"]
