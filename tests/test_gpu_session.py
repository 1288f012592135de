"""Sessions whose look-ups and dense network run on a GPU: the answers of the processor.

Runs where there is a CUDA device: `make test PYTEST_ARGS="-m gpu"`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from inference_session import InferenceSession
from inference_session.device.discovery import unusable_for_sessions
from inference_session.errors import ConfigurationError, InvalidRequestError, UnavailableError
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.model_spec import PREDICTIONS
from inference_session.requests.batch import Request
from tests.testing import concat_model, small_model
from tests.testing import triton_models as models
from tests.testing.full_device import full_device
from tests.testing.hugectr_source import Source
from tests.testing.onnx_models import import_model, model_of, table

Regular: TypeAlias = tuple[InferenceSession, Callable[..., Any]]
NO_GPU = unusable_for_sessions(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, small_model.Arrays]:
    """A version directory and its tables."""
    directory = tmp_path_factory.mktemp("gpu") / "1"
    return directory, small_model.write(directory)


@pytest.fixture(scope="module", params=[{}, {"cache_bytes": 0}])
def session(request: pytest.FixtureRequest, version: tuple[Path, small_model.Arrays]) -> Iterator[InferenceSession]:
    """With all tables on the device, and with all of them in host memory."""
    with InferenceSession.open(version[0], device="cuda:0", warm_up_s=10, **request.param) as opened:
        assert len(opened.stats()["gpu"]["on_host"]) == 3 * len(request.param)
        yield opened


def assert_answers(answer: Any, expected: small_model.Arrays) -> None:
    """Answers have the right type and shape, and the precision of float32."""
    for name, values in expected.items():
        assert answer[name].dtype == np.float32
        assert answer[name].shape == values.shape
        assert np.allclose(answer[name], values, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("seed", [concat_model.CONCAT_SEED, 1, 4, 21, 23])
def test_inputs_are_written_next_to_vectors(tmp_path: Path, seed: int, precision: str) -> None:
    """New sizes and recorded ones, one request or several, also with inputs on the GPU: the original's answers."""
    import cupy

    rng = np.random.default_rng(seed)
    model = concat_model.write(tmp_path / "1", rng)
    tolerance = 1e-4 if precision == "float32" else 0.1
    with InferenceSession.open(model.directory, device="cuda:0", dense_precision=precision) as opened:
        for sizes in 6 * [(1,), (300,), (7, 2), (64,), (5000,)]:
            requests = [model.inputs(size, rng) for size in sizes]
            answers: list[Any] = opened.run_many([Request(inputs) for inputs in requests])
            for found, inputs in zip(answers, requests, strict=True):
                for name, array in model.expected(inputs).items():
                    np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)
        on_gpu = {name: cupy.asarray(array) for name, array in requests[0].items()}
        for name, array in model.expected(requests[0]).items():
            np.testing.assert_allclose(opened.run(on_gpu)[name], array, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_samples", [0, 1, 7, 64, 1000])
def test_all_outputs_agree_with_numpy(
    session: InferenceSession, version: tuple[Path, small_model.Arrays], num_samples: int
) -> None:
    """Plain, joined and pooled look-ups, float16 rows, default vectors, stored keys and row numbers."""
    for seed in range(5):
        inputs = small_model.random_inputs(num_samples, np.random.default_rng(seed))
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))


def test_nothing_is_printed(version: tuple[Path, small_model.Arrays], capfd: pytest.CaptureFixture[str]) -> None:
    """By libraries below us: a server's log would have it at each load."""
    with InferenceSession.open(version[0], device="cuda:0") as session:
        session.run(small_model.random_inputs(3, np.random.default_rng(0)))
    assert capfd.readouterr() == ("", "")


def test_requests_are_joined_and_harm_no_other(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Requests of several sizes in one call have their own answers, a malformed one its own error."""
    rng = np.random.default_rng(1)
    inputs = [small_model.random_inputs(n, rng) for n in (3, 1, 40)]
    bad = {**small_model.random_inputs(2, rng), "dense": np.zeros((3, 3), np.float32)}
    answers = session.run_many([Request(each, None) for each in (*inputs, bad)])
    assert isinstance(answers[3], InvalidRequestError)
    for answer, each in zip(answers, inputs, strict=False):
        assert_answers(answer, small_model.expected(version[1], each))


def test_many_threads_get_their_own_answers(
    session: InferenceSession, version: tuple[Path, small_model.Arrays]
) -> None:
    """Requests from several threads at once."""

    def ask(seed: int) -> None:
        inputs = small_model.random_inputs(1 + seed % 9, np.random.default_rng(seed))
        assert_answers(session.run(inputs), small_model.expected(version[1], inputs))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))


@pytest.fixture(
    scope="module",
    params=[(models.write_joined, models.joined_answer), (models.write_ctr, models.ctr_answer)],
    ids=["joined", "ctr"],
)
def regular(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regular]:
    """Models whose batches of one size differ only in values, and their answers."""
    write, answer = request.param
    directory = tmp_path_factory.mktemp("regular") / "1"
    write(directory)
    with InferenceSession.open(directory, device="cuda:0", warm_up_s=20) as session:
        yield session, answer


def random_request(session: InferenceSession, num_samples: int, rng: np.random.Generator) -> dict[str, Any]:
    """Row numbers, some counted from the end, and multiples of a power of two, so that sums are exact."""
    inputs = {}
    for tensor in session.spec.inputs:
        numbers = rng.integers(-50, 50, (num_samples, *tensor.shape[1:]))
        inputs[tensor.name] = (numbers if "int" in tensor.dtype else numbers / 64).astype(tensor.dtype)
    return inputs


def test_batches_of_one_size_differ_in_their_answers(regular: Regular) -> None:
    """Sizes come again in any order, with other values, in one request or several, among them a large one."""
    session, answer = regular
    rng = np.random.default_rng(2)
    for sizes in ((64,), (3,), (64,), (40, 24), (1,), (1, 1, 1), (3,), (2, 1), (9000,), (64,), (9000,), (5, 59)):
        asked = [random_request(session, n, rng) for n in sizes]
        for found, inputs in zip(session.run_many([Request(each) for each in asked]), asked, strict=True):
            assert isinstance(found, dict)
            assert np.array_equal(found[PREDICTIONS], answer(**inputs))


def test_each_request_gets_the_outputs_it_asked_for(regular: Regular) -> None:
    """Also after a request of the same size for other outputs."""
    session, answer = regular
    rng = np.random.default_rng(3)
    first = session.spec.outputs[0].name
    for outputs in ([first], [PREDICTIONS], [first, PREDICTIONS], [first], [], [PREDICTIONS, first]):
        inputs = random_request(session, 64, rng)
        found = session.run(inputs, outputs)
        assert [*found] == outputs
        for name, values in found.items():
            assert np.array_equal(values, answer(**inputs)[:, : 1 if name == first else None])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CUDA graph of each run of a network, as it comes; "-1": none."""
    from inference_session.dense_engine import cuda as cuda_engine
    from inference_session.dense_engine.onnx import bound_run

    graphs: list[str] = []

    def noted(session: Any, binding: Any, options: Any) -> Callable[[], None]:
        graphs.append(options.get_run_config_entry("gpu_graph_id"))
        return bound_run(session, binding, options)

    monkeypatch.setattr(cuda_engine, "bound_run", noted)
    return graphs


def test_all_sizes_of_the_warm_up_are_replayed(tmp_path: Path, graphs: list[str]) -> None:
    """Also where a size is recorded only when it comes for the second time, as of HugeCTR's requests."""
    source = Source(tmp_path / "source", (400, 500))
    source.model["max_batch_size"] = 2048
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    with InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=60) as session:
        for num_samples in (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            graphs.clear()
            session.run(session.layout.generated(num_samples).inputs)
            assert graphs
            assert "-1" not in graphs


def test_a_thread_that_comes_later_runs_without_graphs(tmp_path: Path, graphs: list[str]) -> None:
    """Graphs are known in the thread that recorded them alone; once it has ended, a new one may have its number."""
    models.write_joined(tmp_path / "1")
    with ThreadPoolExecutor(1) as pool:
        session = pool.submit(InferenceSession.open, tmp_path / "1", device="cuda:0", warm_up_s=20).result()
    assert len(set(graphs)) > 1
    graphs.clear()
    inputs = random_request(session, 64, np.random.default_rng(5))
    for _ in range(10):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(session.run, inputs).result()
    session.close()
    assert set(graphs) == {"-1"}


def test_unknown_rows_are_counted_in_each_batch(regular: Regular) -> None:
    """Each time, in the statistics of the session."""
    session, _ = regular
    inputs = random_request(session, 64, np.random.default_rng(4))
    before = session.stats()["tables"]["item"]["default_vectors"]
    for repetition in range(1, 4):
        inputs[session.spec.lookups[0].keys][:5, 0] = 50 + repetition
        session.run(inputs)
        assert session.stats()["tables"]["item"]["default_vectors"] - before == 5 * repetition


def packed_request(rng: np.random.Generator, num_samples: int, *, is_even: bool, key_type: str = "int64") -> Any:
    """HugeCTR's, to Source's model, with one key in each slot or up to two."""
    lengths = [rng.integers(0, 3, num_samples * slots) for slots in (2, 3)]
    counts = [np.ones_like(each) if is_even else each for each in lengths]
    keys = rng.integers(0, 1000, sum(int(each.sum()) for each in counts))
    return {
        "DES": rng.random((1, 2 * num_samples), np.float32),
        "CATCOLUMN": keys[None].astype(key_type),
        "ROWINDEX": np.concatenate([np.cumsum([0, *each]) for each in counts])[None].astype(np.int32),
    }


def test_bags_of_any_length_are_replayed_with_the_graphs_of_the_warm_up(tmp_path: Path, graphs: list[str]) -> None:
    """Once a size has come twice: the network reads them where it reads requests with one key in each slot."""
    source = Source(tmp_path / "source", (400, 500))
    source.model["max_batch_size"] = 2048
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    rng = np.random.default_rng(7)
    with InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=60) as session:
        for num_samples in (1, 64, 1024):
            for _ in range(3):
                graphs.clear()
                session.run(packed_request(rng, num_samples, is_even=False))
            assert graphs
            assert "-1" not in graphs


@pytest.mark.parametrize("settings", [{}, {"dense_precision": "float16"}, {"cache_bytes": 0}], ids=str)
@pytest.mark.parametrize("key_type", ["int64", "uint32"])
def test_packed_requests_are_answered_as_on_the_processor(
    key_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """HugeCTR's: with one key per slot, with bags of any length, and both side by side; sizes come again."""
    source = Source(tmp_path / "source", (400, 500))
    source.settings["supportlonglong"] = key_type == "int64"
    (report,) = import_hugectr(source.ps_json(), tmp_path / "repository")
    rng = np.random.default_rng(6)
    tolerance = 1e-2 if settings.get("dense_precision") == "float16" else 1e-5
    with (
        InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=20, **settings) as session,
        InferenceSession.open(report.version_dir, device="cpu") as twin,
    ):
        assert session.has_fast_path
        assert session._model.replicas.all[0].network.dense.concat_inputs  # nothing else tells
        for sizes in ((4,), (16,), (4,), (2, 3), (4,), (2, 3), (16, 1, 1), (2, 3)):
            for kinds in ([True] * len(sizes), [False] * len(sizes), [i % 2 == 0 for i in range(len(sizes))]):
                asked = [
                    Request(packed_request(rng, n, is_even=is_even, key_type=key_type))
                    for n, is_even in zip(sizes, kinds, strict=True)
                ]
                for found, expected in zip(session.run_many(asked), twin.run_many(asked), strict=True):
                    assert isinstance(found, dict)
                    assert isinstance(expected, dict)
                    assert np.allclose(found[PREDICTIONS], expected[PREDICTIONS], atol=tolerance)


def test_threads_with_batches_of_one_size(regular: Regular) -> None:
    """Requests from several threads at once, all through the same places in memory."""
    session, answer = regular

    def ask(seed: int) -> None:
        inputs = random_request(session, (7, 64)[seed % 2], np.random.default_rng(seed))
        assert np.array_equal(session.predict(inputs), answer(**inputs))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(200)))


def test_requests_without_samples_may_change_their_shapes(tmp_path: Path) -> None:
    """Where keys are computed, and nothing counts samples, inputs of other shapes have their own answers."""
    vectors = table()
    graph = (
        "g (int64[i] ids, float[a, b] x) => (float[i, 4] z, float[a, b] y)"
        " { k = Mod(ids, rows) z = Gather(emb, k) y = Add(x, x) }"
    )
    report = import_model(tmp_path, model_of(graph, {"emb": vectors, "rows": np.array(len(vectors))}))
    ids = np.array([5, 1007, 3, 999])
    with InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=5) as session:
        assert not session.spec.batched
        for shape in ((2, 3), (2, 3), (3, 2), (2, 3), (6, 1), (1, 1)):
            x = np.random.default_rng(0).random(shape, np.float32)
            answer = session.run({"ids": ids, "x": x})
            assert np.array_equal(answer["y"], x + x)
            assert np.array_equal(answer["z"], vectors[ids % len(vectors)])


def test_tables_may_be_smaller_than_their_budget(version: tuple[Path, small_model.Arrays]) -> None:
    """More cache_bytes than the device has are no error where the tables need less, as during a swap."""
    with InferenceSession.open(version[0], device="cuda:0", cache_bytes=1 << 44) as session:
        assert session.stats()["gpu"]["on_host"] == []


def small_network(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Path:
    """An ONNX file, from which no tables are carved."""
    graph = helper.make_graph(nodes, "small", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "small.onnx")
    return folder / "small.onnx"


def engine_of(path: Path) -> Any:
    """Its dense engine on the first GPU."""
    from inference_session.dense_engine.cuda import CudaEngine
    from inference_session.dense_engine.network_file import NetworkFile
    from inference_session.device.cuda import CudaDevice

    return CudaEngine(NetworkFile(path), num_threads=1, gpu=CudaDevice(0), use_tf32=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of CuPy's streams that were never made
@pytest.mark.parametrize("spare_bytes", [0, 64 << 20])
def test_a_device_without_memory_is_refused_or_left_alone(
    version: tuple[Path, small_model.Arrays], spare_bytes: int
) -> None:
    """If other processes have taken all of it, or all but what small tables need, `cuda:0` says so, and `auto` serves
    from the processor.
    """
    with full_device(spare_bytes):
        with pytest.raises(ConfigurationError, match=r"memory ran out on cuda:0, which has \d+ bytes free of \d+"):
            InferenceSession.open(version[0], device="cuda:0")
        with InferenceSession.open(version[0]) as session:
            assert "gpu" not in session.stats()
    with InferenceSession.open(version[0]) as session:
        assert session.stats()["gpu"]["device"] == "cuda:0"


def test_a_network_that_finds_no_memory_is_refused(tmp_path: Path) -> None:
    """A network larger than the memory that is free: the error tells of memory, not of a damaged file."""
    weights = onnx.numpy_helper.from_array(np.zeros((1 << 14, 1 << 13), np.float32), "w")  # 512 MiB
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1 << 14])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1 << 13])],
        [weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "a.onnx")
    with full_device(400 << 20), pytest.raises(ConfigurationError, match="memory ran out on cuda:0, which has"):
        engine_of(tmp_path / "a.onnx")


@pytest.mark.parametrize("way", ["held", "request"])
def test_a_launch_that_the_device_refuses_is_no_failure(way: str) -> None:
    """The request that needed it gets UnavailableError; the next one is served."""
    import cupy

    from inference_session.device.cuda import CudaDevice

    device = CudaDevice(0)
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    for num_threads in (32, 1 << 20, 32):
        refused = pytest.raises(UnavailableError, match="cuda:0 cannot answer this request: CUDA_ERROR")
        with refused if num_threads > 1024 else contextlib.nullcontext(), getattr(device, way)():
            nothing((1,), (num_threads,), ())
    assert device.failure is None


def test_strings_pass_through_a_network(tmp_path: Path) -> None:
    """A network that reads and makes strings, which cannot lie on a device, runs anyway."""
    nodes = [helper.make_node("Cast", ["x"], ["text"], to=TensorProto.STRING), helper.make_node("Exp", ["x"], ["y"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])]
    outputs = [
        helper.make_tensor_value_info("text", TensorProto.STRING, ["n"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"]),
    ]
    engine = engine_of(small_network(tmp_path, nodes, inputs, outputs))
    for _ in range(3):
        text, y = engine.run({"x": np.array([0, 1], np.float32)}, ["text", "y"])
        assert text.tolist() == ["0", "1"]
        assert np.allclose(y, [1, np.e])


def joining_network(folder: Path, num_inputs: int) -> tuple[Path, list[str]]:
    """A network of one Concat, and its inputs."""
    names = [f"x{i}" for i in range(num_inputs)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in names]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4 * num_inputs])]
    path = small_network(folder, [helper.make_node("Concat", names, ["y"], axis=1)], inputs, outputs)
    return path, names


@pytest.mark.parametrize("num_inputs", [32, 33, 50])
def test_a_network_of_many_inputs_runs_with_graphs_or_without(tmp_path: Path, num_inputs: int) -> None:
    """Where one node reads more arrays than a kernel takes as parameters, nothing is recorded."""
    path, names = joining_network(tmp_path, num_inputs)
    engine = engine_of(path)
    prepared: dict[int, Any] = {}
    rng = np.random.default_rng(0)

    def ask(num_samples: int) -> None:
        arrays = {name: rng.random((num_samples, 4), np.float32) for name in names}
        (found,) = engine.run(arrays, ["y"], prepared.setdefault(num_samples, engine.prepare()))
        assert np.array_equal(found, np.concatenate(list(arrays.values()), axis=1))

    for num_samples in (2, 3, 5, 2, 3, 5):
        ask(num_samples)
    engine.end_warm_up()
    assert num_inputs <= 32 or not engine.replays
    for num_samples in (5, 2, 3, 7, 2, 5, 3):
        ask(num_samples)


def test_a_network_may_be_freed_after_its_device(tmp_path: Path) -> None:
    """Bindings keep it. It no longer needs the device's stream."""
    path, names = joining_network(tmp_path, 50)
    arrays = {name: np.full((2, 4), i, np.float32) for i, name in enumerate(names)}
    for _ in range(10):
        engine = engine_of(path)
        prepared = engine.prepare()
        for _ in range(3):
            (found,) = engine.run(arrays, ["y"], prepared)
            assert np.array_equal(found, np.concatenate(list(arrays.values()), axis=1))
        assert len(prepared) > 0
        del engine
        del prepared


def test_inputs_come_out_as_outputs(tmp_path: Path) -> None:
    """A network that only passes on its inputs, small or large, copies them between host memory and the device."""
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Flatten", ["x"], ["flat"])]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 3])]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 3]),
        helper.make_tensor_value_info("flat", TensorProto.FLOAT, ["n", 6]),
    ]
    engine = engine_of(small_network(tmp_path, nodes, inputs, outputs))
    for num_samples in (1, 5, 5, 20_000, 5, 1, 20_000):
        x = np.random.default_rng(num_samples).random((num_samples, 2, 3), np.float32)
        y, flat = engine.run({"x": x}, ["y", "flat"])
        assert np.array_equal(y, x)
        assert np.array_equal(flat, x.reshape(num_samples, 6))


def test_values_that_a_network_refuses_are_the_requests_fault(tmp_path: Path) -> None:
    """Shapes that clash inside the network are an InvalidRequestError; the next request is answered."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [name]) for name in "ab"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])]
    engine = engine_of(small_network(tmp_path, [helper.make_node("Add", ["a", "b"], ["y"])], inputs, outputs))
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="the network cannot compute these values"):
            engine.run({"a": np.ones(3, np.float32), "b": np.ones(4, np.float32)}, ["y"])
        (answer,) = engine.run({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}, ["y"])
        assert answer.tolist() == [2.0] * 3


def test_unknown_keys_are_counted(version: tuple[Path, small_model.Arrays]) -> None:
    """As on the processor: the same statistics for the same requests."""
    counts = []
    for device in ("cpu", "cuda:0"):
        with InferenceSession.open(version[0], device=device) as session:
            for seed in range(3):
                session.run(small_model.random_inputs(20, np.random.default_rng(seed)))
            counts.append(session.stats())
    assert counts[0]["tables"] == counts[1]["tables"]


@pytest.mark.parametrize("precision", ["tf32", "float16"])
def test_less_precise_networks_are_close(tmp_path: Path, precision: str) -> None:
    """Layers over the vectors answer what float64 does within the documented bound, with graphs and without."""
    rng = np.random.default_rng(5)
    shapes = ((36, 128), (128, 32), (32, 1))
    layers = {f"w{i}": (rng.standard_normal(s) * (2 / s[0]) ** 0.5).astype(np.float32) for i, s in enumerate(shapes)}
    graph = (
        "g (int64[n, 8] ids, float[n, 4] dense) => (float[n, 1] click)"
        " { e = Gather(emb, ids) f = Flatten(e) x = Concat<axis = 1>(f, dense) a = MatMul(x, w0) b = Relu(a)"
        " c = MatMul(b, w1) d = Relu(c) y = MatMul(d, w2) click = Sigmoid(y) }"
    )
    emb = table()
    report = import_model(tmp_path, model_of(graph, {"emb": emb, **layers}))
    with InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=10, dense_precision=precision) as session:
        for num_samples in (1, 64, 64, 500, 500):
            ids = rng.integers(0, len(emb), (num_samples, 8))
            dense = rng.standard_normal((num_samples, 4), np.float32)
            expected = np.concatenate([emb[ids].reshape(num_samples, -1), dense], axis=1).astype(float)
            for matrix in layers.values():
                expected = np.maximum(expected @ matrix, 0) if matrix is not layers["w2"] else expected @ matrix
            found = session.predict({"ids": ids, "dense": dense})
            np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), rtol=0, atol=2e-3)


def test_sessions_on_all_gpus_at_once(version: tuple[Path, small_model.Arrays]) -> None:
    """Several in one process, two on a GPU, opened, recorded, asked and closed at once, do not disturb one another."""
    import cupy

    num_gpus = cupy.cuda.runtime.getDeviceCount()

    def use(number: int) -> None:
        with InferenceSession.open(version[0], device=f"cuda:{number % num_gpus}", warm_up_s=20) as session:
            for i in range(100):
                inputs = small_model.random_inputs(1 + i % 40, np.random.default_rng(100 * number + i))
                assert_answers(session.run(inputs), small_model.expected(version[1], inputs))

    with ThreadPoolExecutor(2 * num_gpus) as pool:
        list(pool.map(use, range(2 * num_gpus)))


@pytest.mark.parametrize("model", ["small", "ctr"])
def test_a_failed_device_answers_no_more(model: str, tmp_path: Path) -> None:
    """After an illegal access on the device each request gets UnavailableError, and readiness says why:
    where batches are computed, and where they are replayed. All sessions can be closed.
    """
    directory = tmp_path / "1"
    if model == "small":
        small_model.write(directory)
        inputs = "small_model.random_inputs(4, np.random.default_rng(0))"
    else:
        models.write_ctr(directory)
        inputs = "{'ids': np.ones((4, 3), np.int64), 'dense': np.ones((4, 2), np.float32)}"
    script = f"""
import numpy as np
import cupy
from inference_session import InferenceSession
from inference_session.errors import UnavailableError
from tests.testing import small_model
session, other = (InferenceSession.open({str(directory)!r}, device="cuda:0") for _ in range(2))
inputs = {inputs}
for _ in range(5):
    session.run(inputs)
assert session.failure is None
cupy.RawKernel('extern "C" __global__ void break_it(int* p) {{ *p = 1; }}', "break_it")((1,), (1,), (np.uint64(16),))
for _ in range(3):
    try:
        session.run(inputs)
    except UnavailableError as error:
        assert "cuda:0 has failed" in str(error), error
    else:
        raise AssertionError("answered")
assert "cuda:0 has failed" in session.failure
session.close()
other.close()  # which has not heard of it
print("all as expected", flush=True)
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=200, cwd=Path.cwd()
    )
    assert "all as expected" in done.stdout, done.stderr


@pytest.mark.parametrize("splits", [False, True])
def test_inputs_on_the_gpu(tmp_path: Path, splits: bool) -> None:
    """Arrays on the session's GPU are read there, whatever their layout, and give what arrays on the host do."""
    import cupy

    rng = np.random.default_rng(8)
    emb = table()
    read = "a, b = Split<axis = 1>(ids, sizes)" if splits else "a = Identity(ids) b = Identity(more)"
    inputs = "int32[n, 8] ids" if splits else "int32[n, 5] ids, int32[n, 3] more"
    graph = (
        f"g ({inputs}, float[n, 4] dense) => (float[n, 1] click)"
        f" {{ axis = Constant<value_ints = [1]>() sizes = Constant<value_ints = [5, 3]>() {read}"
        " ea = Gather(emb, a) eb = Gather(emb, b) pa = ReduceSum<keepdims = 0>(ea, axis)"
        " pb = ReduceSum<keepdims = 0>(eb, axis) x = Concat<axis = 1>(pa, pb, dense) click = MatMul(x, w) }"
    )
    w = rng.standard_normal((2 * emb.shape[1] + 4, 1)).astype(np.float32)
    report = import_model(tmp_path, model_of(graph, {"emb": emb, "w": w}))
    names = {"ids": 8} if splits else {"ids": 5, "more": 3}
    with InferenceSession.open(report.version_dir, device="cuda:0", warm_up_s=5) as session:
        for num_samples in (1, 64, 64, 64, 3000, 3000):
            request = {name: rng.integers(0, len(emb), (num_samples, k)).astype(np.int32) for name, k in names.items()}
            request["dense"] = rng.standard_normal((num_samples, 4)).astype(np.float32)
            expected = session.predict(request)
            for order in ("C", "F"):
                given = {name: cupy.asarray(array, order=order) for name, array in request.items()}
                np.testing.assert_allclose(session.predict(given), expected, rtol=1e-6, atol=1e-6)
                for name, array in given.items():
                    np.testing.assert_array_equal(array.get(), request[name])
            mixed = {**request, "ids": cupy.asarray(request["ids"])}
            np.testing.assert_allclose(session.predict(mixed), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(InvalidRequestError, match="input 'ids' has type int64, expected int32"):
            session.predict({**request, "ids": cupy.asarray(request["ids"].astype(np.int64))})
    with InferenceSession.open(report.version_dir, device="cpu") as session:
        np.testing.assert_allclose(session.predict(given), expected, rtol=1e-4, atol=1e-4)
