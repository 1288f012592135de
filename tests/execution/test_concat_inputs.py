"""What a network puts side by side, vectors and inputs of requests, is written into one matrix: the same answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession, Request
from inference_session.dense_engine.base import BoundRun, ConcatInput, GivenColumns
from inference_session.dense_engine.concat_engine import ConcatEngine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.device.host import HostDevice
from inference_session.errors import InvalidRequestError
from inference_session.execution.network import Network
from inference_session.version_directory.manifest import write_manifest
from tests.testing import concat_model
from tests.testing.concat_model import Arrays, ConcatModel
from tests.testing.launched_tables import CopyingDevice
from tests.testing.onnx_models import assert_same, import_model, model_of, table

SEEDS = range(24)
SIZES = ((1,), (7, 2), (64,), (3,), (1, 1, 5), (40,), (2,))


def assert_close(found: Arrays, expected: Arrays) -> None:
    """Equal up to rounding of sums in another order; a row that is not finite spoils no other."""
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-4)


def concat_inputs_of(session: InferenceSession) -> tuple[ConcatInput, ...]:
    """The concat inputs of its network."""
    network: Network = session._model.replicas.all[0].network  # nothing else tells
    return network.dense.concat_inputs


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_are_those_of_the_original_network(seed: int, tmp_path: Path) -> None:
    """Operands in any order, nested or read elsewhere as well; single requests and several, of changing sizes."""
    rng = np.random.default_rng(seed)
    model = concat_model.write(tmp_path / "1", rng)
    with InferenceSession.open(model.directory) as session:
        for sizes in SIZES:
            requests = [model.inputs(size, rng, length=int(rng.integers(1, 4))) for size in sizes]
            if rng.random() < 0.5:
                spoil(requests[0], model, rng)
            for found, inputs in zip(answers(session, requests), requests, strict=True):
                assert_close(found, model.expected(inputs))


def spoil(inputs: Arrays, model: ConcatModel, rng: np.random.Generator) -> None:
    """Put a number that is not finite into one row."""
    names = [tensor.name for tensor in model.spec.inputs if tensor.name.startswith("dense")]
    array = inputs[rng.choice(names)]
    array.reshape(len(array), -1)[rng.integers(len(array)), 0] = rng.choice([np.nan, np.inf, -np.inf])


def answers(session: InferenceSession, requests: Sequence[Arrays]) -> list[Any]:
    """On the fast path or, where it does not take them, on the general one."""
    if len(requests) == 1:
        return [session.run(requests[0])]
    return session.run_many([Request(inputs) for inputs in requests])


def test_most_networks_of_the_family_are_joined(tmp_path: Path) -> None:
    """The tests test something: a concat input stands for all operands, and vectors come first."""
    found: Counter[bool] = Counter()
    for seed in SEEDS:
        model = concat_model.write(tmp_path / str(seed), np.random.default_rng(seed))
        with InferenceSession.open(model.directory) as session:
            concat_inputs = concat_inputs_of(session)
        found[bool(concat_inputs)] += 1
        for each in concat_inputs:
            assert each.first_given == sum(concat_model.WIDTHS[name] for name in each.vectors)
            assert each.width % 16 == 0
            given = [tensor for tensor in model.spec.inputs if tensor.name.startswith("dense")]
            assert dict(each.given) == {tensor.name: math.prod(tensor.shape[1:]) for tensor in given}
    assert found[True] >= 8
    assert found[False] >= 3


def test_no_memory_shows_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was in memory before a batch, columns that nothing fills are zeros on the general path as well."""
    monkeypatch.setattr("inference_session.execution.staging.create.stage_on_host", lambda *_: None)
    monkeypatch.setattr(HostDevice, "empty", lambda _, shape, dtype: np.full(shape, np.nan, dtype))
    rng = np.random.default_rng(concat_model.CONCAT_SEED)
    model = concat_model.write(tmp_path / "1", rng)
    with InferenceSession.open(model.directory) as session:
        assert concat_inputs_of(session)
        for num_samples in (5, 1, 0, 9):
            inputs = model.inputs(num_samples, rng)
            assert_close(session.run(inputs), model.expected(inputs))


CONCAT = ConcatInput("joined", ("vectors",), 5, (GivenColumns("a", 2), GivenColumns("b", 3)), 16)


def concat_engine(folder: Path, device: HostDevice) -> ConcatEngine:
    """Its network answers the concat input."""
    path = folder / "network.onnx"
    onnx.save(model_of("g (float[n, 16] joined) => (float[n, 16] out) { out = Identity(joined) }", {}), path)
    return ConcatEngine(OnnxEngine(NetworkFile(path), num_threads=1), (CONCAT,), device)


@pytest.mark.parametrize("device", [HostDevice(), CopyingDevice()])
def test_a_bound_run_reads_what_the_host_writes(device: HostDevice, tmp_path: Path) -> None:
    """Vectors and given inputs change between runs, in place or where the device has the host write them."""
    engine, rng = concat_engine(tmp_path, device), np.random.default_rng(0)
    matrix = np.full((4, 16), np.nan, np.float32)
    given = {name: np.zeros((4, width), np.float32) for name, width in CONCAT.given}
    bound = engine.bind({"joined": matrix, **given}, ["out"])
    assert isinstance(bound, BoundRun)
    for _ in range(3):
        vectors, a, b = (rng.random((4, width), np.float32) for width in (5, 2, 3))
        matrix[:, :5] = vectors
        bound.inputs["a"][...], bound.inputs["b"][...] = a, b
        (found,) = bound.run()
        np.testing.assert_array_equal(found, np.concatenate([vectors, a, b, np.zeros((4, 6))], axis=1))


@pytest.mark.parametrize("wrong", [np.zeros((3, 2)), np.zeros((4, 3)), np.zeros((1, 2)), np.zeros(2), np.float32(1)])
def test_other_shapes_are_refused(wrong: NDArray[np.float64], tmp_path: Path) -> None:
    """Given inputs have a row for each row of vectors."""
    engine = concat_engine(tmp_path, HostDevice())
    inputs = {
        "joined": np.zeros((4, 16), np.float32),
        "a": np.asarray(wrong, np.float32),
        "b": np.zeros((4, 3), np.float32),
    }
    with pytest.raises(InvalidRequestError, match=r"'a' is .*, expected float32 of 4 samples with 2 elements"):
        engine.run(inputs, ["out"])


def test_keys_may_be_computed(tmp_path: Path) -> None:
    """Vectors of keys that a graph computes stand next to inputs as well."""
    rng = np.random.default_rng(0)
    constants = {"offsets": np.array([0, 100, 200]), "t": table(), "w": rng.random((14, 2), np.float32)}
    model = model_of(
        "g (int64[n, 3] ids, float[n, 2] dense) => (float[n, 2] out) { k = Add(ids, offsets) e = Gather(t, k)"
        " f = Flatten(e) x = Concat<axis = 1>(dense, f) out = MatMul(x, w) }",
        constants,
    )
    report = import_model(tmp_path, model)
    with InferenceSession.open(report.version_dir) as session:
        assert concat_inputs_of(session)[0].first_given == 12
    for num_samples in (1, 6):
        inputs = {"ids": rng.integers(0, 700, (num_samples, 3)), "dense": rng.random((num_samples, 2), np.float32)}
        assert_same(report, tmp_path / "model.onnx", inputs)


@pytest.mark.parametrize("num_keys", [1, 2, 4, 40])
def test_more_or_fewer_computed_keys_are_refused(tmp_path: Path, num_keys: int) -> None:
    """Where keys.onnx does not fit the network, no vector or input goes where others belong."""
    constants = {"offsets": np.array([0, 100, 200]), "t": table(), "w": np.ones((14, 2), np.float32)}
    model = model_of(
        "g (int64[n, 3] ids, float[n, 2] dense) => (float[n, 2] out) { k = Add(ids, offsets) e = Gather(t, k)"
        " f = Flatten(e) x = Concat<axis = 1>(dense, f) out = MatMul(x, w) }",
        constants,
    )
    directory = import_model(tmp_path, model).version_dir
    (name,) = (value.name for value in onnx.load(directory / "keys.onnx").graph.output)
    nodes = f"first = Gather<axis = 1>(ids, zero) {name} = Expand(first, sizes)"
    graph = f"g (int64[n, 3] ids) => (int64[n, m] {name}) {{ {nodes} }}"
    onnx.save(model_of(graph, {"zero": np.array([0]), "sizes": np.array([1, num_keys])}), directory / "keys.onnx")
    write_manifest(directory)
    with InferenceSession.open(directory) as session:
        for num_samples in (1, 64):
            inputs = {"ids": np.zeros((num_samples, 3), np.int64), "dense": np.ones((num_samples, 2), np.float32)}
            with pytest.raises(InvalidRequestError, match=f"have {4 * num_keys} elements for each sample, expected 12"):
                session.run(inputs)
