"""The contract of every dense engine of an ONNX file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from inference_session.dense_engine.base import DenseEngine
from inference_session.errors import InvalidRequestError, SessionClosedError
from tests.testing.onnx_models import model_of

ROWS, VECTOR, WIDTH, HIDDEN = 5, 4, 8, 48
GRAPH = (
    "g (int64[n, 2] ids, float[n, 8] dense)"
    " => (float[n, 1] click, float[n, 48] layer, int64[n, 2] next, int64[n, 2] ids)"
    " { e = Gather(small, ids) f = Flatten(e) x = Concat<axis = 1>(f, dense) a = MatMul(x, w0) b = Add(a, b0)"
    " layer = Relu(b) y = MatMul(layer, w1) click = Sigmoid(y) next = Add(ids, one) }"
)


def constants() -> dict[str, NDArray[Any]]:
    """A small table that stayed in the network, two layers, and a whole number."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * (2 / shape[0]) ** 0.5).astype(np.float32)

    inputs = 2 * VECTOR + WIDTH
    return {
        "small": drawn(ROWS, VECTOR),
        "w0": drawn(inputs, HIDDEN),
        "b0": drawn(HIDDEN),
        "w1": drawn(HIDDEN, 1),
        "one": np.array(1, np.int64),
    }


def drawn_inputs(num_samples: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Values for both inputs."""
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(-ROWS, ROWS, (num_samples, 2)),
        "dense": rng.standard_normal((num_samples, WIDTH), np.float32),
    }


def expected(inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """In float64."""
    known = constants()
    vectors = known["small"][inputs["ids"]].reshape(len(inputs["ids"]), 2 * VECTOR)
    x = np.concatenate([vectors, inputs["dense"]], axis=1).astype(float)
    layer = np.maximum(x @ known["w0"] + known["b0"], 0)
    return {"click": 1 / (1 + np.exp(-layer @ known["w1"])), "layer": layer, "next": inputs["ids"] + 1}


class DenseEngineContract:
    """Subclass it with a fixture `engine`, which opens the file at `network`, and say how far answers may be off."""

    tolerance = 1e-5
    """Tolerance for numbers up to 1, and relative to the largest of a tensor's values."""

    @pytest.fixture
    def network(self, tmp_path: Path) -> Path:
        """The file of a network."""
        path = tmp_path / "dense.onnx"
        onnx.save(model_of(GRAPH, constants()), path)
        return path

    def assert_right(self, engine: DenseEngine, inputs: dict[str, NDArray[Any]], outputs: list[str]) -> None:
        """Compare what the engine computes with float64."""
        wanted = expected(inputs)
        for name, found in zip(outputs, engine.run(inputs, outputs), strict=True):
            assert found.shape == wanted[name].shape
            if name == "next":
                assert found.tolist() == wanted[name].tolist()
            else:
                assert found.dtype == np.float32
                atol = self.tolerance * max(1, np.abs(wanted[name]).max(initial=0))
                np.testing.assert_allclose(found, wanted[name], rtol=0, atol=atol)

    def test_names(self, engine: DenseEngine) -> None:
        """An engine names its inputs and the outputs that it can compute."""
        assert engine.input_names == {"ids", "dense"}
        assert engine.output_names == {"click", "layer", "next", "ids"}

    @pytest.mark.parametrize("num_samples", [1, 2, 3, 64, 65, 1000])
    def test_answers(self, engine: DenseEngine, num_samples: int) -> None:
        """All outputs are right for batches of any size."""
        for seed in range(3):
            self.assert_right(engine, drawn_inputs(num_samples, seed), ["click", "layer", "next"])

    def test_sizes_one_after_another(self, engine: DenseEngine) -> None:
        """A batch of another size than the last is computed as a whole, and so is one with no samples."""
        for num_samples in (7, 1, 0, 300, 2, 300, 0, 7):
            self.assert_right(engine, drawn_inputs(num_samples, num_samples), ["click", "layer"])

    @pytest.mark.parametrize("outputs", [[], ["layer"], ["next"], ["next", "click"], ["click", "layer"]])
    def test_some_outputs(self, engine: DenseEngine, outputs: list[str]) -> None:
        """The requested outputs are returned, in the requested order."""
        self.assert_right(engine, drawn_inputs(5), outputs)

    def test_answers_are_the_caller_s(self, engine: DenseEngine) -> None:
        """A later run changes neither earlier answers nor inputs."""
        inputs = drawn_inputs(9)
        copies = {name: array.copy() for name, array in inputs.items()}
        first = engine.run(inputs, ["click", "layer"])
        kept = [array.copy() for array in first]
        engine.run(drawn_inputs(9, seed=1), ["click", "layer"])
        for array, copy in zip(first, kept, strict=True):
            np.testing.assert_array_equal(array, copy)
        for name, array in inputs.items():
            np.testing.assert_array_equal(array, copies[name])

    def test_arrays_with_gaps(self, engine: DenseEngine) -> None:
        """Inputs may be parts of larger arrays."""
        inputs = drawn_inputs(20)
        inputs["dense"] = np.asfortranarray(inputs["dense"])[::2]
        inputs["ids"] = inputs["ids"][::2]
        self.assert_right(engine, inputs, ["click"])

    def test_prepared_memory(self, engine: DenseEngine) -> None:
        """Preparing a shape does not change the answers."""
        prepared = engine.prepare()
        for seed in range(4):
            inputs = drawn_inputs(6, seed)
            (found,) = engine.run(inputs, ["click"], prepared)
            np.testing.assert_allclose(found, expected(inputs)["click"], rtol=0, atol=self.tolerance)

    def test_bound_runs(self, engine: DenseEngine) -> None:
        """An engine that binds memory reads its current content at each run, which may write over the last answer."""
        first, *others = (drawn_inputs(6, seed) for seed in range(4))
        bound = engine.bind({name: array.copy() for name, array in first.items()}, ["layer", "click"])
        if bound is None:
            return
        results = bound.run()
        answers = [[array.copy() for array in results]]
        for inputs in others:
            for name, array in bound.inputs.items():
                array[...] = inputs[name]
            promised = bound.results
            results = bound.run()
            assert promised is None or results is promised
            answers.append([array.copy() for array in results])
        for inputs, found in zip((first, *others), answers, strict=True):
            for name, array in zip(["layer", "click"], found, strict=True):
                np.testing.assert_allclose(array, expected(inputs)[name], rtol=0, atol=4 * self.tolerance)

    def test_an_output_that_is_an_input(self, engine: DenseEngine) -> None:
        """Its values are those of each run, bound or not: ONNX Runtime does not write them to bound memory."""
        first = drawn_inputs(6)
        prepared = engine.prepare()
        bound = engine.bind({name: array.copy() for name, array in first.items()}, ["ids", "click"])
        for seed in range(4):
            inputs = drawn_inputs(6, seed)
            found = [engine.run(inputs, ["ids", "click"], prepared)]
            if bound is not None:
                for name, array in bound.inputs.items():
                    array[...] = inputs[name]
                found.append(bound.run())
            for ids, click in found:
                np.testing.assert_array_equal(ids, inputs["ids"])
                np.testing.assert_allclose(click, expected(inputs)["click"], rtol=0, atol=4 * self.tolerance)

    def test_threads(self, engine: DenseEngine) -> None:
        """Several threads run it at once, each with its own batches."""

        def run(seed: int) -> None:
            for i in range(20):
                self.assert_right(engine, drawn_inputs(1 + (seed * i) % 40, seed), ["click", "layer"])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(8)))

    @pytest.mark.parametrize("row", [ROWS, -ROWS - 1, 2**40, np.iinfo(np.int64).min])
    def test_rows_outside_small_tables(self, engine: DenseEngine, row: int) -> None:
        """A row number that a table in the network does not have is refused, and the next batch is right."""
        inputs = drawn_inputs(3)
        inputs["ids"][1, 1] = row
        with pytest.raises(InvalidRequestError, match="network cannot compute"):
            engine.run(inputs, ["click"])
        self.assert_right(engine, drawn_inputs(3), ["click"])

    @pytest.mark.parametrize(
        "dense", [np.zeros((3, WIDTH + 1)), np.zeros((2, WIDTH)), np.zeros((3, WIDTH, 1)), np.zeros(WIDTH)]
    )
    def test_shapes_that_do_not_fit(self, engine: DenseEngine, dense: NDArray[np.float64]) -> None:
        """Inputs of another shape, or of another number of samples, are refused."""
        with pytest.raises(InvalidRequestError, match="network cannot compute"):
            engine.run({**drawn_inputs(3), "dense": dense.astype(np.float32)}, ["click"])
        self.assert_right(engine, drawn_inputs(3), ["click"])

    def test_types_that_do_not_fit(self, engine: DenseEngine) -> None:
        """Numbers of another type are refused."""
        with pytest.raises(InvalidRequestError, match="network cannot compute"):
            engine.run({**drawn_inputs(3), "dense": np.zeros((3, WIDTH))}, ["click"])

    def test_closing(self, engine: DenseEngine) -> None:
        """A closed engine refuses to run; a second close has no effect."""
        engine.close()
        engine.close()
        with pytest.raises(SessionClosedError):
            engine.run(drawn_inputs(1), ["click"])
