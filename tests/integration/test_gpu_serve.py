"""Models on a real server's GPUs: instances of KIND_GPU, clients' tensors in device memory, several GPUs.

Runs where there is a CUDA device and a tritonserver: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from inference_session.device.discovery import unusable, unusable_for_sessions
from tests.testing.model_settings import add_settings
from tests.testing.served import Served, start
from tests.testing.servers import wait_until
from tests.testing.triton_models import NUM_ROWS, ctr_answer, write_ctr

NO_GPU = unusable_for_sessions(0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}"),
]
ON_GPU = """
parameters [ { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "no" } } ]
"""


def write_gpu_model(folder: Path, devices: str, **settings: str) -> None:
    """A model with an instance on each of these GPUs, which takes tensors wherever they are."""
    write_ctr(folder / "1")
    config = (folder / "config.pbtxt").read_text(encoding="utf-8")
    begin = config.index("instance_group")
    groups = f"instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {devices} ] }} ]\n"
    kept = config[:begin] + config[config.index("]", begin) + 1 :]
    (folder / "config.pbtxt").write_text(kept + groups + ON_GPU, encoding="utf-8")
    add_settings(folder / "config.pbtxt", settings)


def write_model_of_both(folder: Path) -> None:
    """A model whose one process has its rows divided among two GPUs."""
    write_ctr(folder / "1")
    add_settings(folder / "config.pbtxt", {"device": "cuda:0,1", "shard": "rows"})


@pytest.fixture(scope="module")
def served(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a model on the first GPU, and one on the first two if there are as many."""
    repository = tmp_path_factory.mktemp("gpus")
    write_gpu_model(repository / "one", "0")
    if unusable(1) is None:
        write_gpu_model(repository / "two", "0, 1")
        write_model_of_both(repository / "both")
        write_gpu_model(repository / "apart", "0, 1", shard="rows")
    served = start(repository)
    yield served
    status = served.stop()
    served.close()
    assert status == 0


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    """A client of the server."""
    with served.grpc_client() as client:
        yield client


def random_request(num_samples: int, seed: int) -> dict[str, NDArray[Any]]:
    """A random request to the model `ctr`."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(-50, 50, (num_samples, 2)) / 64
    return {"ids": rng.integers(-NUM_ROWS, NUM_ROWS, (num_samples, 3)), "dense": dense.astype(np.float32)}


def tensors_of(arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Tensors without contents yet."""
    return [
        tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        for name, array in arrays.items()
    ]


def is_answered(client: Any, model: str, seed: int) -> bool:
    """Whether a request of some size gets its own answer; False where it gets none."""
    try:
        assert_answered(client, model, seed)
    except InferenceServerException:
        return False
    return True


def assert_answered(client: Any, model: str, seed: int) -> None:
    """A request of some size gets its own answer."""
    request = random_request(1 + seed % 70, seed)
    tensors = tensors_of(request)
    for tensor, array in zip(tensors, request.values(), strict=True):
        tensor.set_data_from_numpy(array)
    assert np.array_equal(client.infer(model, tensors).as_numpy("OUTPUT0"), ctr_answer(**request))


def test_an_instance_of_kind_gpu_has_tables_and_network_there(served: Served, client: Any) -> None:
    """Requests of many sizes from several threads get their own answers, and the log names no processor."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: assert_answered(client, "one", seed), range(200)))
    assert not [line for line in served.errors if "on the CPU" in line]


def test_tensors_in_device_memory_are_taken_from_there(client: Any) -> None:
    """A client on the same machine passes a handle to its own device memory instead of values."""
    shared_memory = pytest.importorskip("tritonclient.utils.cuda_shared_memory", exc_type=RuntimeError)
    request = random_request(64, 1)
    tensors, regions = tensors_of(request), []
    try:
        for tensor, (name, array) in zip(tensors, request.items(), strict=True):
            region = shared_memory.create_shared_memory_region(name, array.nbytes, 0)
            regions.append(region)
            shared_memory.set_shared_memory_region(region, [array])
            client.register_cuda_shared_memory(name, shared_memory.get_raw_handle(region), 0, array.nbytes)
            tensor.set_shared_memory(name, array.nbytes)
        for _ in range(3):
            assert np.array_equal(client.infer("one", tensors).as_numpy("OUTPUT0"), ctr_answer(**request))
    finally:
        client.unregister_cuda_shared_memory()
        for region in regions:
            shared_memory.destroy_shared_memory_region(region)


@pytest.mark.skipif(unusable(1) is not None, reason=f"no second GPU: {unusable(1)}")
def test_each_gpu_has_an_instance_of_its_own(served: Served, client: Any) -> None:
    """Two processes, one a GPU, share the requests."""
    assert len(served.stubs("two")) == 2
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: assert_answered(client, "two", seed), range(400)))
    (stats,) = client.get_inference_statistics("two", as_json=True)["model_stats"]
    assert int(stats["inference_stats"]["success"]["count"]) == 400


@pytest.mark.skipif(unusable(1) is not None, reason=f"no second GPU: {unusable(1)}")
def test_one_process_answers_on_both_gpus(served: Served, client: Any) -> None:
    """Requests of many sizes from several threads get their own answers, also while the model is loaded again."""
    assert len(served.stubs("both")) == 1
    with ThreadPoolExecutor(9) as pool:
        loads = pool.submit(lambda: [client.load_model("both") for _ in range(3)])
        list(pool.map(lambda seed: assert_answered(client, "both", seed), range(400)))
        loads.result()
    (stats,) = client.get_inference_statistics("both", as_json=True)["model_stats"]
    assert "fail" not in stats["inference_stats"] or int(stats["inference_stats"]["fail"].get("count", 0)) == 0


@pytest.mark.skipif(unusable(1) is not None, reason=f"no second GPU: {unusable(1)}")
def test_processes_share_rows_that_are_divided_among_their_gpus(served: Served, client: Any) -> None:
    """One on each GPU; also while the model is loaded again, and while one of them is killed and started anew."""
    with ThreadPoolExecutor(9) as pool:
        loads = pool.submit(lambda: [client.load_model("apart") for _ in range(3)])
        list(pool.map(lambda seed: assert_answered(client, "apart", seed), range(400)))
        loads.result()
    (stats,) = client.get_inference_statistics("apart", as_json=True)["model_stats"]
    assert "fail" not in stats["inference_stats"] or int(stats["inference_stats"]["fail"].get("count", 0)) == 0
    first, _ = served.stubs("apart")
    first.kill()
    wait_until(lambda: first not in served.stubs("apart") and len(served.stubs("apart")) == 2, "a new process")
    wait_until(lambda: all(is_answered(client, "apart", seed) for seed in range(20)), "answers of both")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: assert_answered(client, "apart", seed), range(400)))
