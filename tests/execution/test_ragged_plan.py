"""Batches whose bags differ in length: a bound network answers them, over memory that other requests use as well."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.dense_engine.base import BoundRun
from inference_session.dense_engine.concat_engine import ConcatEngine
from inference_session.device.arena import Arena
from inference_session.device.host import HostDevice
from inference_session.execution.concat_operands import with_concat_inputs
from inference_session.execution.network import Network
from inference_session.execution.plan import FreshPlan, RaggedPlan, RecordedPlan
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.requests.batch import Request
from inference_session.requests.layouts import layout_of
from inference_session.requests.outputs import Outputs
from inference_session.rows.files import FileRows
from inference_session.version_directory.version import VersionDirectory
from tests.testing.hugectr_source import CONCAT, Source, concat_parts
from tests.testing.launched_tables import CopiedColumns, Echo, LaunchedTables

Inputs = dict[str, NDArray[Any]]
SLOTS = (2, 3)
DEFAULTS = np.full(1, 0.25, np.float32), np.full(4, -1, np.float32)


class RepeatingDevice(HostDevice):
    """The processor with memory like a GPU's: each request begins with what the one before it had taken."""

    def __init__(self) -> None:
        self._arena = Arena(lambda num_bytes: np.full(num_bytes, 0xEE, np.uint8), 1 << 10)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        yield
        self._arena.reset()

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        block, begin = self._arena.take(num_bytes)
        return block[begin : begin + num_bytes].view(dtype).reshape(shape)

    def columns(self, matrix: Any, first: int, widths: Sequence[int]) -> Any:
        return CopiedColumns(matrix, first, widths)

    def counts(self, num_counts: int) -> NDArray[np.int64]:
        counts = self.empty((num_counts,), np.int64)
        counts[:] = 0
        return counts

    def stage(self, array: NDArray[Any]) -> NDArray[Any]:
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def stage_keys(self, parts: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        return self.stage(np.concatenate(parts, axis=None, dtype=np.int64))

    def used(self) -> Any:
        return self._arena.position()

    def skip(self, used: Any) -> None:
        self._arena.reset(used)


class PlacedEcho(Echo):
    """Its inputs are bound in the memory of a device."""

    device: RepeatingDevice
    num_bound = 0

    def bind(self, inputs: Any, outputs: Sequence[str]) -> BoundRun:
        run = super().bind(inputs, outputs)
        for name, array in run.inputs.items():
            run.inputs[name] = self.device.stage(array)  # type: ignore[index]
        self.num_bound += 1
        return run


class Model:
    """A model of HugeCTR's on such a device; its network answers what it reads."""

    def __init__(self, source: Source, *, joined: bool) -> None:
        """`joined`: whether it reads a concat input."""
        (report,) = import_hugectr(source.ps_json(), source.folder / "repository")
        version = VersionDirectory.read(report.version_dir)
        spec, files = version.spec, version.open_tables()
        self.tables = tables = LaunchedTables(files, num_threads=1)
        tables.device = RepeatingDevice()
        self.rows = FileRows(files, [tables])
        names = {CONCAT.name} if joined else {"dense", *(lookup.dense_input for lookup in spec.lookups)}
        self.echo = PlacedEcho(names, () if joined else ("dense",))
        self.echo.device = tables.device
        dense = ConcatEngine(self.echo, (CONCAT,), tables.device) if joined else self.echo
        kind = layout_of(spec)
        self.layout = kind(spec, Outputs(spec), network_inputs=frozenset({"dense"}), max_elements=1 << 20)
        own = with_concat_inputs(spec, dense.concat_inputs)
        self.network = Network(own, tables, dense, None, keys_follow_inputs=kind.keys_follow_inputs)
        self.outputs = tuple(sorted(names))

    def answer(self, requests: Sequence[Inputs]) -> tuple[type[Any], Inputs, list[int]]:
        """The kind of plan that was used, what the network read, and the unknown keys of each table."""
        batch = self.layout.join([self.layout.check(Request(inputs, ())) for inputs in requests])
        plan = self.network.plan(batch, self.outputs)
        with plan.held():
            lookup = plan.fill(batch)
            self.tables.look_up(lookup)
            found = plan.run_network(batch)
            if CONCAT.name in found:
                found = concat_parts(found[CONCAT.name])
            return type(plan), found, plan.num_unknown(lookup).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("ragged") / "source", (400, 500))


@pytest.fixture(params=[False, True], ids=["alone", "joined"])
def model(request: pytest.FixtureRequest, source: Source, tmp_path: Path) -> Iterator[Model]:
    source.folder = source.folder.rename(tmp_path / "source")
    model = Model(source, joined=request.param)
    yield model
    model.rows.close()


def draw(rng: np.random.Generator, samples: int, longest: int) -> tuple[Inputs, list[list[list[int]]]]:
    """A request, and the keys of each bag of each table. `longest` 0: one key in each."""
    bags: list[list[list[int]]] = [[] for _ in SLOTS]
    for _ in range(samples):
        for table, slots in enumerate(SLOTS):
            lengths = rng.integers(0, longest + 1, slots) if longest else np.ones(slots, np.int64)
            bags[table] += [rng.integers(-5, 1000, n).tolist() for n in lengths]
    by_sample = [bags[table][s * w : (s + 1) * w] for s in range(samples) for table, w in enumerate(SLOTS)]
    keys = [key for part in by_sample for bag in part for key in bag]
    offsets = [n for of_table in bags for n in (0, *itertools.accumulate(map(len, of_table)))]
    inputs: Inputs = {
        "DES": rng.random((1, 2 * samples), np.float32),
        "CATCOLUMN": np.array(keys, np.int64)[None],
        "ROWINDEX": np.array(offsets, np.int32)[None],
    }
    return inputs, bags


def check(model: Model, source: Source, drawn: Sequence[tuple[Inputs, list[list[list[int]]]]]) -> type[Any]:
    """Compare with sums of rows; returns the kind of plan."""
    kind, found, unknown = model.answer([inputs for inputs, _ in drawn])
    for table, name in enumerate(("wide", "deep")):
        rows = dict(zip(source.keys[table].tolist(), source.vectors[table], strict=True))
        bags = [bag for _, of_request in drawn for bag in of_request[table]]
        sums = [sum((rows.get(key, DEFAULTS[table]) for key in bag), np.zeros_like(DEFAULTS[table])) for bag in bags]
        np.testing.assert_allclose(found[name].reshape(len(bags), -1), np.array(sums), rtol=1e-5, atol=1e-6)
        if kind is not RecordedPlan:  # repeated look-ups of the stand-in count nothing
            assert unknown[table] == sum(key not in rows for bag in bags for key in bag)
    np.testing.assert_array_equal(found["dense"], np.concatenate([i["DES"].reshape(-1, 2) for i, _ in drawn]))
    return kind


def test_batches_of_any_number_of_keys_share_one_binding_per_size(model: Model, source: Source) -> None:
    """From the second one of a size on, whatever came in between: few keys, many, one per slot, none at all."""
    rng = np.random.default_rng(5)
    sizes = (4,), (7,), (1, 3)
    kinds: dict[tuple[int, bool], list[type[Any]]] = {}
    for longest in (3, 3, 0, 1, 40, 0, 2, 200, 3):
        for size in sizes:
            kind = check(model, source, [draw(rng, samples, longest) for samples in size])
            kinds.setdefault((sum(size), longest > 0), []).append(kind)
    for (_, is_ragged), seen in kinds.items():
        assert seen == [FreshPlan, *[RaggedPlan if is_ragged else RecordedPlan] * (len(seen) - 1)]
    assert model.echo.num_bound == 4

    empty = {**draw(rng, 4, 1)[0], "CATCOLUMN": np.zeros((1, 0), np.int64), "ROWINDEX": np.zeros((1, 22), np.int32)}
    assert check(model, source, [(empty, [[[]] * 8, [[]] * 12])]) is RaggedPlan
