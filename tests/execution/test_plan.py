"""Plans by shape: which are kept, and what a plan with fixed memory does with another batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun, DenseEngine
from inference_session.execution.network import Network
from inference_session.execution.plan import FreshPlan, RecordedPlan
from inference_session.requests.batch import CheckedRequest, JoinedBatch
from inference_session.version_directory.version import VersionDirectory
from tests.testing.launched_tables import LaunchedTables
from tests.testing.onnx_models import import_model, model_of, table


class Sums(DenseEngine):
    """Adds up the vectors of each sample, in memory that is bound."""

    def __init__(self, name: str) -> None:
        self.input_names, self.name, self.bound = frozenset({name}), name, 0

    def may_bind(self, outputs: Sequence[str]) -> bool:
        return True

    def run(self, inputs: Any, outputs: Sequence[str], prepared: Any = None) -> list[Any]:
        return [inputs[self.name].reshape(len(inputs[self.name]), -1).sum(axis=1)]

    def bind(self, inputs: Any, outputs: Sequence[str]) -> BoundRun:
        engine, self.bound = self, self.bound + 1

        class Run(BoundRun):
            inputs: Any = {}  # noqa: RUF012

            def run(self) -> list[Any]:
                return engine.run(inputs, outputs)

        return Run()

    def close(self) -> None:
        """There is nothing to free."""


class Planned(NamedTuple):
    """The network of a model, and what its plans launch."""

    tables: LaunchedTables
    dense: Sums
    network: Network


@pytest.fixture
def version(tmp_path: Path) -> VersionDirectory:
    """A model that looks up three keys per sample."""
    graph = "g (int64[n, 3] ids) => (float[n, 12] y) { e = Gather(emb, ids) y = Flatten(e) }"
    return VersionDirectory.read(import_model(tmp_path, model_of(graph, {"emb": table()})).version_dir)


@pytest.fixture
def planned(version: VersionDirectory) -> Iterator[Planned]:
    files = version.open_tables()
    tables = LaunchedTables(files, num_threads=1)
    (lookup,) = version.spec.lookups
    dense = Sums(lookup.dense_input)
    yield Planned(tables, dense, Network(version.spec, tables, dense, None, keys_follow_inputs=True))
    for file in files:
        file.close()


def batch_of(ids: NDArray[np.int64]) -> JoinedBatch:
    return JoinedBatch.of([CheckedRequest({"ids": ids}, ["y"], len(ids), shapes=ids.shape[1:])])


def test_batches_of_one_shape_go_the_same_way_with_other_values(planned: Planned) -> None:
    """One binding per shape; each batch has the answer of its own keys, and its own unknown keys."""
    tables, dense, network = planned
    rng = np.random.default_rng(0)
    for size in (4, 7, 4, 4, 7):
        ids = rng.integers(0, 1000, (size, 3))
        batch = batch_of(ids)
        plan = network.plan(batch, ["y"])
        assert isinstance(plan, RecordedPlan)
        with plan.held():
            tables.look_up(plan.fill(batch))
            found = plan.run_network(batch)["y"]
        expected = table()[ids].reshape(size, -1).sum(axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert dense.bound == 2


class DeviceArray:
    """As much of an array on a device as plans look at, over host memory."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.dtype, self.itemsize, self.shape = array, array.dtype, array.itemsize, array.shape
        self.data = self
        self.ptr = array.ctypes.data

    def __len__(self) -> int:
        return len(self.array)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_keys_on_the_device_are_read_where_they_are(planned: Planned, dtype: str) -> None:
    """Whatever their type; each batch has its own memory, so nothing is recorded."""
    tables, dense, network = planned
    rng = np.random.default_rng(0)
    for size in (4, 7, 4, 4, 7):
        ids = rng.integers(0, 1000, (size, 3)).astype(dtype)
        batch = batch_of(DeviceArray(ids))  # type: ignore[arg-type]
        plan = network.plan(batch, ["y"])
        assert isinstance(plan, FreshPlan)
        with plan.held():
            tables.look_up(plan.fill(batch))
            found = plan.run_network(batch)["y"]
        np.testing.assert_allclose(found, table()[ids].reshape(size, -1).sum(axis=1), rtol=1e-5)
    assert not dense.bound
