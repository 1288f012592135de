"""Requests to a real server: right answers for good ones, INVALID_ARG for bad ones, and no harm to others."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as system_memory
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests.testing.served import NUMPY_1, Serve, Served, shared_memory
from tests.testing.served_requests import DENSE, IDS, ask, counted_since, is_unregistered, post, settled
from tests.testing.servers import wait_until
from tests.testing.triton_models import NUM_ROWS, TABLE, ctr_answer, flat_answer, write_ctr, write_types

pytestmark = pytest.mark.triton


@pytest.fixture
def grpc(served: Served) -> Iterator[Any]:
    """A gRPC client."""
    with served.grpc_client() as client:
        yield client


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_answers_are_those_of_numpy(served: Served, protocol: str) -> None:
    """Both protocols give the model's own outputs, and the predictions side by side."""
    with served.http_client() if protocol == "http" else served.grpc_client() as client:
        answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE})

    expected = ctr_answer(IDS, DENSE)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected)
    np.testing.assert_array_equal(answer.as_numpy("click"), expected[:, :1])
    np.testing.assert_array_equal(answer.as_numpy("like"), expected[:, 1:])


def test_a_repository_may_lie_in_a_folder_of_any_name(serve: Serve, tmp_path: Path) -> None:
    """Although Triton's Python processes can decode ASCII names only."""
    write_ctr(tmp_path / "dépôt модели" / "ctr" / "1")

    with serve(tmp_path / "dépôt модели").grpc_client() as client:
        answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE})

    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


def test_other_users_cannot_read_requests(served: Served) -> None:
    """They pass through shared memory, which Triton lets all users read."""
    memory = shared_memory(served.process.pid)

    assert memory
    assert [path for path in memory if path.stat().st_mode & 0o077] == []


def test_answers_plain_json(served: Served) -> None:
    """A request of JSON alone, as curl sends it, is answered in JSON."""
    inputs = [
        {"name": "ids", "shape": [2, 3], "datatype": "INT64", "data": IDS.tolist()},
        {"name": "dense", "shape": [2, 2], "datatype": "FP32", "data": DENSE.tolist()},
    ]
    status, answer = post(served, "ctr", json.dumps({"inputs": inputs, "outputs": [{"name": "OUTPUT0"}]}).encode())

    assert status == 200
    assert [output["name"] for output in answer["outputs"]] == ["OUTPUT0"]
    np.testing.assert_array_equal(np.array(answer["outputs"][0]["data"]).reshape(2, 2), ctr_answer(IDS, DENSE))


@contextlib.contextmanager
def shared_region(grpc: Any, num_bytes: int) -> Iterator[Any]:
    """System shared memory that is registered as "ids"."""
    name = f"/hotrow_test_{os.getpid()}"
    region = system_memory.create_shared_memory_region("ids", name, num_bytes)
    try:
        grpc.register_system_shared_memory("ids", name, num_bytes)
        yield region
    finally:
        wait_until(lambda: is_unregistered(grpc), "Triton to let go of the region")
        system_memory.destroy_shared_memory_region(region)


def test_reads_system_shared_memory(served: Served, grpc: Any) -> None:
    """Inputs may lie in shared memory that the client registered."""
    with shared_region(grpc, IDS.nbytes) as region:
        system_memory.set_shared_memory_region(region, [IDS])
        ids = tritonclient.grpc.InferInput("ids", [2, 3], "INT64")
        ids.set_shared_memory("ids", IDS.nbytes)
        dense = tritonclient.grpc.InferInput("dense", [2, 2], "FP32")
        dense.set_data_from_numpy(DENSE)

        answer = grpc.infer("ctr", [ids, dense])

    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


REGION_BYTES = 64
OF_SHARED_MEMORY = {
    "beyond its end": (REGION_BYTES + 1, 0, 2),
    "less than the shape": (24, 0, 2),
    "more than the shape": (REGION_BYTES, 0, 2),
    "an offset beyond its end": (48, REGION_BYTES - 4, 2),
    "a shape beyond its end": (48 * 100, 0, 200),
}
"""Bytes, offset and samples of an input of 24 bytes a sample."""


@pytest.mark.parametrize("case", OF_SHARED_MEMORY)
def test_shared_memory_that_does_not_fit_is_refused(grpc: Any, case: str) -> None:
    """Nothing beyond the region is read, and the server goes on."""
    num_bytes, offset, num_samples = OF_SHARED_MEMORY[case]
    with shared_region(grpc, REGION_BYTES):
        ids = tritonclient.grpc.InferInput("ids", [num_samples, 3], "INT64")
        ids.set_shared_memory("ids", num_bytes, offset)
        dense = tritonclient.grpc.InferInput("dense", [num_samples, 2], "FP32")
        dense.set_data_from_numpy(np.ones((num_samples, 2), np.float32))
        with pytest.raises(InferenceServerException, match="byte size"):
            grpc.infer("ctr", [ids, dense])
    answer = ask(grpc, "ctr", {"ids": IDS, "dense": DENSE})
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


def test_describes_the_models_own_tensors(grpc: Any) -> None:
    """A client that asks for metadata sees the original inputs, no carved-out tables."""
    metadata = grpc.get_model_metadata("ctr")

    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [
        ("ids", "INT64", [-1, 3]),
        ("dense", "FP32", [-1, 2]),
    ]
    assert [output.name for output in metadata.outputs] == ["click", "like", "OUTPUT0"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"hotrow_probe": True},
        {"hotrow_probe": "guessed"},
        {"hotrow_probe": ""},
        {"not_hotrow_probe": True},
        {"caller": "hotrow_probe_dashboard"},
        {"caller": '{"hotrow_probe": true}'},
    ],
)
def test_parameters_of_clients_do_not_replace_their_requests(grpc: Any, parameters: dict[str, Any]) -> None:
    """Only a request with the launcher's key is a probe, for which the model makes up a request."""
    answer = ask(grpc, "ctr", {"ids": IDS, "dense": DENSE}, parameters=parameters)

    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


def test_only_requested_outputs_are_answered(grpc: Any) -> None:
    """A request for one output gets that one."""
    answer = ask(grpc, "ctr", {"ids": IDS, "dense": DENSE}, ["like"])

    assert [output.name for output in answer.get_response().outputs] == ["like"]


def test_no_samples_give_no_rows(grpc: Any) -> None:
    """A request of 0 samples is answered by 0 rows where we count samples, not Triton."""
    answer = ask(grpc, "flat", {"item": np.empty(0, np.int64), "price": np.empty(0, np.float32)})

    assert answer.as_numpy("score").shape == (0,)
    assert answer.as_numpy("OUTPUT0").shape == (0, 1)


@pytest.mark.parametrize("length", [0, 3])
def test_no_samples_of_open_size_give_no_rows(grpc: Any, length: int) -> None:
    """Triton would never answer a request of shape [0, 0], so models of which that is a request are joined by us."""
    answer = ask(grpc, "bags", {"bag": np.empty((0, length), np.int64)})

    assert answer.as_numpy("score").shape == (0, 1)


def test_triton_refuses_no_samples_where_it_batches(grpc: Any) -> None:
    """With `max_batch_size` above 0 a request of 0 samples never reaches us: Triton's core refuses it by name."""
    with pytest.raises(InferenceServerException, match="input byte size mismatch for input") as caught:
        ask(grpc, "ctr", {"ids": IDS[:0], "dense": DENSE[:0]})

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_nan_stays_in_its_row(grpc: Any) -> None:
    """A NaN in one sample affects only that sample's predictions."""
    dense = DENSE.copy()
    dense[0, 0] = math.nan

    answer = ask(grpc, "ctr", {"ids": IDS, "dense": dense}).as_numpy("OUTPUT0")

    assert np.isnan(answer[0]).all()
    np.testing.assert_array_equal(answer[1], ctr_answer(IDS, DENSE)[1])


def test_halves_and_booleans(grpc: Any) -> None:
    """Types that NumPy and Triton spell differently arrive and leave unchanged."""
    flag = np.array([[True], [False], [True]])
    half = np.array([[0.5], [-2], [65504]], np.float16)

    answer = ask(grpc, "types", {"flag": flag, "half": half})

    np.testing.assert_array_equal(answer.as_numpy("opposite"), ~flag)
    np.testing.assert_array_equal(answer.as_numpy("same"), half)


def test_strings(serve: Serve, tmp_path: Path) -> None:
    """Strings arrive and leave unchanged; where Triton's Python backend cannot pass them, loading says what to do."""
    write_types(tmp_path / "strings" / "1", strings=True)
    if not NUMPY_1:
        with pytest.raises(AssertionError, match=r"'word' holds strings.*pip install 'numpy<2'"):
            serve(tmp_path)
        return
    arrays = {
        "word": np.array([["one"], ["zwölf"], [""]], object),
        "flag": np.ones((3, 1), bool),
        "half": np.ones((3, 1), np.float16),
    }

    with serve(tmp_path).grpc_client() as client:
        answer = ask(client, "strings", arrays).as_numpy("echo")

    assert [item.decode() for item in answer.ravel()] == ["one", "zwölf", ""]


def joined(served: Served, model: str, requests: list[dict[str, NDArray[Any]]]) -> list[Any]:
    """The answers to requests of 16 threads, which are sent until some have been computed together."""
    answers: list[Any] = []

    def are_joined() -> bool:
        """Whether there were fewer runs of the dense network than requests."""
        before = settled(served, model)
        with served.grpc_client() as client, ThreadPoolExecutor(16) as threads:
            answers[:] = threads.map(lambda arrays: ask(client, model, arrays), requests)
        return counted_since(served, model, before, len(requests))["hotrow_batches_total"] < len(requests)

    wait_until(are_joined, "requests to be joined")
    return answers


def test_concurrent_requests_are_joined(served: Served) -> None:
    """Requests of different sizes that wait together are computed together, and each gets its own rows."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 300)
    requests = [
        {"ids": rng.integers(0, NUM_ROWS, (n, 3)), "dense": rng.integers(0, 9, (n, 2)).astype(np.float32)}
        for n in sizes
    ]

    answers = joined(served, "ctr", requests)

    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(request["ids"], request["dense"]))


def test_flat_requests_are_joined_by_us(served: Served) -> None:
    """A model with 1-D tensors, which Triton's batcher cannot join, is joined anyway."""
    rng = np.random.default_rng(1)
    requests = [
        {"item": rng.integers(0, NUM_ROWS, n), "price": rng.integers(0, 9, n).astype(np.float32)}
        for n in rng.integers(0, 20, 300)
    ]

    answers = joined(served, "flat", requests)

    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("score"), flat_answer(request["item"], request["price"]))


def test_ragged_requests_are_joined(served: Served) -> None:
    """Bags of different lengths, each request its own, are computed together."""
    rng = np.random.default_rng(2)
    requests = [{"bag": rng.integers(0, NUM_ROWS, (n, n + 1))} for n in rng.integers(1, 12, 200)]

    answers = joined(served, "bags", requests)

    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(answer.as_numpy("score"), TABLE[request["bag"]].sum((1, 2))[:, None])


BAD: dict[str, tuple[str, dict[str, NDArray[Any]], str]] = {
    "wrong type": ("ctr", {"ids": IDS.astype(np.int32), "dense": DENSE}, "ids"),
    "missing input": ("ctr", {"ids": IDS}, "dense"),
    "unknown input": ("ctr", {"ids": IDS, "dense": DENSE, "more": DENSE}, "more"),
    "wrong width": ("ctr", {"ids": IDS[:, :2], "dense": DENSE}, "ids"),
    "wrong rank": ("ctr", {"ids": IDS[0], "dense": DENSE}, "ids"),
    "unequal samples": ("ctr", {"ids": IDS[:1], "dense": DENSE}, "dense|ids"),
    "too many samples": (
        "ctr",
        {"ids": np.zeros((1025, 3), np.int64), "dense": np.zeros((1025, 2), np.float32)},
        "1024",
    ),
    "flat, too many": (
        "flat",
        {"item": np.zeros(65, np.int64), "price": np.zeros(65, np.float32)},
        "'item' has 65 .* 64",
    ),
    "flat, unequal": (
        "flat",
        {"item": np.zeros(2, np.int64), "price": np.zeros(3, np.float32)},
        "'price' has 3 samples",
    ),
    "flat, wrong rank": ("flat", {"item": np.zeros((2, 1), np.int64), "price": np.zeros(2, np.float32)}, "item"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_requests_are_invalid_arguments(grpc: Any, case: str) -> None:
    """Every malformed request gets INVALID_ARG that names what is wrong, and the server goes on."""
    model, arrays, message = BAD[case]

    with pytest.raises(InferenceServerException, match=message) as caught:
        ask(grpc, model, arrays)

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    np.testing.assert_array_equal(
        ask(grpc, "ctr", {"ids": IDS, "dense": DENSE}).as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE)
    )


def test_an_unknown_output_is_an_invalid_argument(grpc: Any) -> None:
    """A request for an output that the model lacks is refused by name."""
    with pytest.raises(InferenceServerException, match="absent") as caught:
        ask(grpc, "ctr", {"ids": IDS, "dense": DENSE}, ["absent"])

    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_truncated_binary_is_an_invalid_argument(served: Served) -> None:
    """A binary body that is shorter than its header says is refused, naming the input."""
    header = json.dumps(
        {
            "inputs": [
                {"name": "ids", "shape": [2, 3], "datatype": "INT64", "parameters": {"binary_data_size": 48}},
                {"name": "dense", "shape": [2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 16}},
            ]
        }
    ).encode()
    body = header + IDS.tobytes() + DENSE.tobytes()[:7]

    status, answer = post(served, "ctr", body, **{"Inference-Header-Content-Length": str(len(header))})

    assert status == 400
    assert "dense" in answer["error"]


@pytest.mark.parametrize("model", ["ctr", "flat"])
def test_a_bad_request_harms_no_batch_mate(served: Served, model: str) -> None:
    """Among concurrent requests only the bad ones get errors."""
    bad = {"ctr": BAD["unequal samples"][1], "flat": BAD["flat, unequal"][1]}[model]
    good: dict[str, NDArray[Any]] = {"ids": IDS, "dense": DENSE}
    expected = ctr_answer(IDS, DENSE)
    if model == "flat":
        good = {"item": np.arange(3), "price": np.ones(3, np.float32)}
        expected = flat_answer(good["item"], good["price"])[:, None]

    def send(i: int) -> Any:
        with contextlib.suppress(InferenceServerException):
            return ask(client, model, bad if i % 3 == 0 else good)

    with served.grpc_client() as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(send, range(300)))

    for i, answer in enumerate(answers):
        assert (answer is None) == (i % 3 == 0)
        if answer is not None:
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), expected)


def test_ids_outside_the_table_are_counted(served: Served, grpc: Any) -> None:
    """An unknown id is answered by the default vector, and the metrics say so."""
    before = settled(served, "ctr")
    ids = np.array([[NUM_ROWS, 10**12, 1]])

    answer = ask(grpc, "ctr", {"ids": ids, "dense": DENSE[:1]}).as_numpy("click")

    grown = counted_since(served, "ctr", before, 1)
    assert answer[0, 0] == TABLE[1].sum() + DENSE[0].sum()
    assert grown["hotrow_default_vectors_total"] == 2
    assert grown["hotrow_lookup_keys_total"] == 3


def test_metrics_count_requests_samples_and_failures(served: Served, grpc: Any) -> None:
    """The counters of a model grow by exactly what was asked."""
    before = settled(served, "flat")
    for _ in range(3):
        ask(grpc, "flat", {"item": np.arange(5), "price": np.ones(5, np.float32)})
    for case in ("flat, unequal", "flat, too many"):
        with pytest.raises(InferenceServerException):
            ask(grpc, "flat", BAD[case][1])

    grown = counted_since(served, "flat", before, 5)
    assert grown["hotrow_requests_total"] == 5
    assert grown["hotrow_failed_requests_total"] == 2
    assert grown["hotrow_samples_total"] == 15
    assert grown["hotrow_batches_total"] == 3


def test_random_bodies_do_not_hurt(served: Served) -> None:
    """Bodies mutated at random are answered, well or by an error, and the server serves as before."""
    rng = random.Random(0)
    inputs = [
        {"name": "ids", "shape": [2, 3], "datatype": "INT64", "data": IDS.tolist()},
        {"name": "dense", "shape": [2, 2], "datatype": "FP32", "data": DENSE.tolist()},
    ]
    for _ in range(300):
        body = json.loads(json.dumps({"inputs": inputs}))
        for _ in range(rng.randint(1, 3)):
            mutate(rng, rng.choice(body["inputs"]))
        status, _ = post(served, "ctr", json.dumps(body).encode())
        assert status in (200, 400, 500)

    with served.grpc_client() as client:
        answer = ask(client, "ctr", {"ids": IDS, "dense": DENSE})
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), ctr_answer(IDS, DENSE))


def mutate(rng: random.Random, tensor: dict[str, Any]) -> None:
    """Change one thing in a tensor of a JSON request. Huge shapes, which crash Triton itself, are left out."""
    field = rng.choice(["name", "shape", "datatype", "data"])
    tensor[field] = rng.choice(
        {
            "name": ["ids", "dense", "", "x" * 1000, "\0", 7, None],
            "shape": [[2], [2, 3, 1], [-1, 3], [0, 3], [3, 2], [], "2", [2.5, 3], [1000, 3], None],
            "datatype": ["INT32", "FP64", "BYTES", "BOOL", "FP16", "BF16", "", "int64", None],
            "data": [[], [1], [[1, 2], [3]], ["a"] * 6, [1e400] * 6, [2**63] * 6, [True] * 4, {}, None, "text"],
        }[field]
    )


def test_random_binary_does_not_hurt(served: Served) -> None:
    """Binary tensors of random bytes and wrong sizes are answered, and the server serves as before."""
    rng = np.random.default_rng(3)
    for size in rng.integers(0, 100, 100):
        header = json.dumps(
            {
                "inputs": [
                    {
                        "name": "bag",
                        "shape": [int(rng.integers(0, 4)), int(rng.integers(0, 4))],
                        "datatype": "INT64",
                        "parameters": {"binary_data_size": int(size)},
                    }
                ]
            }
        ).encode()
        status, _ = post(
            served, "bags", header + rng.bytes(size), **{"Inference-Header-Content-Length": str(len(header))}
        )
        assert status in (200, 400)

    with served.grpc_client() as client:
        bag = np.frombuffer(struct.pack("<2q", 3, 4), np.int64).reshape(1, 2)
        assert ask(client, "bags", {"bag": bag}).as_numpy("score")[0, 0] == TABLE[[3, 4]].sum()


def test_scalars_are_sent_in_shape_1(grpc: Any) -> None:
    """Triton has none."""
    inputs = {"logit": np.array([1, 3], np.float32), "temperature": np.array([2], np.float32)}

    answer = ask(grpc, "scalar", inputs)

    np.testing.assert_array_equal(answer.as_numpy("hot"), [0.5, 1.5])
    np.testing.assert_array_equal(answer.as_numpy("largest"), [1.5])
