"""Requests whose arrays are copied straight into a recorded batch's inputs get the same answers as otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from inference_session.dense_engine.base import DenseEngine
from inference_session.dense_engine.concat_engine import ConcatEngine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.execution.concat_operands import with_concat_inputs
from inference_session.execution.network import Network
from inference_session.execution.staging.cuda import stage_on_gpu
from inference_session.importers.hugectr.importer import import_hugectr
from inference_session.kernels.cpu.requests.gathering import COPY, FROM_UINT32, SAME, gather
from inference_session.model_spec import (
    BLOCK_CONTEXT,
    ROW_CONTEXT,
    LookupSpec,
    ModelSpec,
    RankingSpec,
    TableSpec,
    TensorSpec,
)
from inference_session.requests.batch import Request
from inference_session.requests.layouts import layout_of
from inference_session.requests.outputs import Outputs
from inference_session.requests.ranking_layout import RankingLayout
from inference_session.rows.files import FileRows
from inference_session.tables.table_file import TableFile, write_table
from inference_session.version_directory.version import VersionDirectory
from tests.testing.hugectr_source import CONCAT, Source, concat_parts
from tests.testing.launched_tables import CopyingDevice, Echo, LaunchedTables
from tests.testing.onnx_models import model_of

Inputs = dict[str, NDArray[Any]]


class Model:
    """A model on a device that repeats its launches, whose network answers what it reads."""

    def __init__(
        self,
        spec: ModelSpec,
        files: list[TableFile],
        given: tuple[str, ...],
        keys: OnnxEngine | None = None,
        *,
        joined: bool = False,
    ) -> None:
        """`joined`: whether the network reads Source's concat input."""
        self.rows = FileRows(files, [LaunchedTables(files, num_threads=1)])
        names = {CONCAT.name} if joined else {*given, *(lookup.dense_input for lookup in spec.lookups)}
        self.outputs = tuple(sorted(names))
        kind = layout_of(spec)
        read = frozenset(given) | (keys.input_names if keys else set())
        computed = (TensorSpec(name, "float32", (-1,)) for name in self.outputs)
        outputs = Outputs(replace(spec, outputs=(*spec.outputs, *computed)))
        self.layout = kind(spec, outputs, network_inputs=read, max_elements=1 << 20)
        echo = Echo(names, () if joined else given)
        dense: DenseEngine = ConcatEngine(echo, (CONCAT,), CopyingDevice()) if joined else echo
        own = with_concat_inputs(spec, dense.concat_inputs)
        self.network = Network(own, self.rows.readers[0], dense, keys, keys_follow_inputs=kind.keys_follow_inputs)
        pool = stage_on_gpu(own, self.layout, self.network)
        assert pool is not None
        self.staging = pool.new()
        self.names = [tensor.name for tensor in spec.inputs]

    def record(self, requests: list[Inputs]) -> None:
        """Have the shape of these requests recorded; they are overwritten."""
        for _ in range(2):
            batch = self.layout.join([self.layout.check(Request(inputs, ())) for inputs in requests])
            self.network.plan(batch, self.outputs)

    def answer(self, requests: list[Inputs]) -> Inputs | None:
        """The arrays that the network reads."""
        arrays = [inputs[name] for inputs in requests for name in self.names]
        batch = self.staging.fill(arrays, len(requests), self.outputs)
        if batch is None:
            return None
        batch.look_up()
        found = dict(zip(self.outputs, batch.run.run(), strict=True))
        return concat_parts(found[CONCAT.name]) if CONCAT.name in found else found


DENSE_INPUT = TensorSpec("dense", "float32", (-1, 2))
INPUTS = (
    TensorSpec("ids", "int64", (-1, 2)),
    TensorSpec("codes", "int32", (-1,)),
    TensorSpec("bags", "int64", (-1, -1)),
    DENSE_INPUT,
)


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    return np.random.default_rng(0).random((50, 3), np.float32)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, vectors: NDArray[np.float32]) -> Model:
    """Plain, pooled and narrow keys, and an input that look-ups and network both read."""
    folder = tmp_path_factory.mktemp("table") / "t"
    write_table(folder, [vectors])
    table = TableSpec("t", "t", len(vectors), 3, keys="row_number")
    spec = ModelSpec(
        inputs=INPUTS,
        outputs=(DENSE_INPUT,),
        tables=(table,),
        lookups=(
            LookupSpec("t", "ids", "a"),
            LookupSpec("t", "codes", "b"),
            LookupSpec("t", "bags", "c", pooling="sum"),
        ),
    )
    return Model(spec, [TableFile.open(folder, table)], ("dense", "ids"))


def native_request(rng: np.random.Generator, samples: int, length: int) -> Inputs:
    return {
        "ids": rng.integers(0, 50, (samples, 2)),
        "codes": rng.integers(-50, 50, samples).astype(np.int32),
        "bags": rng.integers(0, 50, (samples, length)),
        "dense": rng.random((samples, 2), np.float32),
    }


def test_arrays_of_recorded_shapes_are_answered(native: Model, vectors: NDArray[np.float32]) -> None:
    """One request or several, shapes in any order; a shape that is not recorded takes the other way."""
    rng = np.random.default_rng(1)
    shapes = [((3,), 4), ((2, 5), 1), ((1, 1), 4)]
    for sizes, length in shapes:
        requests = [native_request(rng, samples, length) for samples in sizes]
        assert native.answer(requests) is None
        native.record(requests)
    for sizes, length in [*shapes, *reversed(shapes)]:
        requests = [native_request(rng, samples, length) for samples in sizes]
        found = native.answer(requests)
        joined = {name: np.concatenate([inputs[name] for inputs in requests]) for name in native.names}
        assert found is not None
        np.testing.assert_array_equal(found["a"], vectors[joined["ids"]])
        np.testing.assert_array_equal(found["b"], vectors[joined["codes"]])
        np.testing.assert_allclose(found["c"], vectors[joined["bags"]].sum(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(found["dense"], joined["dense"])
        np.testing.assert_array_equal(found["ids"], joined["ids"])


_KEY_GRAPH = """keys (int64[n, 2] ids, int32[n] codes, int64[n, l] bags, float[n, 2] dense)
    => (int64[n, 2] ids_0, int32[n] codes_0, int64[n, l] bags_0, float[n, l] weights, int64[k] some) {
        ids_0 = Mod(ids, rows)  codes_0 = Max(codes, zero)  bags_0 = Abs(bags)  weights = Cast<to = 1>(bags)
        positive = ReduceMax(dense, axes)  few = Greater(positive, half)  chosen = Compress(codes_0, few)
        some = Cast<to = 7>(chosen) }"""


@pytest.fixture(scope="module", params=["weights", "values"])
def computing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vectors: NDArray[np.float32]
) -> Model:
    """The same with a key graph; `values`: the shape of some keys follows from values."""
    folder = tmp_path_factory.mktemp("table") / "t"
    write_table(folder, [vectors])
    constants = {"rows": np.array(50), "zero": np.array(0, np.int32)}
    limits = {"axes": np.array([1]), "half": np.array([[0.5]], np.float32)}
    graph = model_of(_KEY_GRAPH, constants | limits)
    if request.param == "weights":
        del graph.graph.output[-1]
    onnx.save(graph, folder / "keys.onnx")
    table = TableSpec("t", "t", len(vectors), 3, keys="row_number")
    lookups = [
        LookupSpec("t", "ids_0", "a"),
        LookupSpec("t", "codes_0", "b"),
        LookupSpec("t", "bags_0", "c", pooling="sum", weights="weights"),
        LookupSpec("t", "ids", "d"),
        LookupSpec("t", "some", "e"),
    ]
    spec = ModelSpec(
        inputs=INPUTS,
        outputs=(DENSE_INPUT,),
        tables=(table,),
        lookups=tuple(lookups if request.param == "values" else lookups[:-1]),
    )
    keys = OnnxEngine(NetworkFile(folder / "keys.onnx"), num_threads=1)
    return Model(spec, [TableFile.open(folder, table)], ("dense", "ids"), keys)


def test_keys_that_a_graph_computes_are_looked_up(computing: Model, vectors: NDArray[np.float32]) -> None:
    """Next to keys that are inputs, of one request or several; shapes that follow from values may be left out."""
    rng, has_values = np.random.default_rng(8), "e" in computing.outputs
    for sizes, length in [((3,), 4), ((2, 5), 1), ((1, 1), 4)] * 2:
        requests = [native_request(rng, samples, length) for samples in sizes]
        if computing.answer(requests) is None:
            computing.record(requests)
        for _ in range(3):
            requests = [native_request(rng, samples, length) for samples in sizes]
            found = computing.answer(requests)
            if found is None:
                assert has_values
                continue
            joined = {name: np.concatenate([inputs[name] for inputs in requests]) for name in computing.names}
            np.testing.assert_array_equal(found["a"], vectors[joined["ids"]])
            np.testing.assert_array_equal(found["b"], vectors[np.maximum(joined["codes"], 0)])
            weighted = vectors[joined["bags"]] * joined["bags"][..., None]
            np.testing.assert_allclose(found["c"], weighted.sum(axis=1), rtol=1e-5)
            np.testing.assert_array_equal(found["d"], vectors[joined["ids"]])
            np.testing.assert_array_equal(found["ids"], joined["ids"])
            if has_values:
                chosen = joined["codes"][joined["dense"].max(axis=1) > 0.5]
                np.testing.assert_array_equal(found["e"], vectors[np.maximum(chosen, 0)])


def test_inputs_of_the_network_are_copied_during_the_look_up(native: Model, vectors: NDArray[np.float32]) -> None:
    """Only what the look-up reads has been copied when it is launched."""
    rng = np.random.default_rng(7)
    requests = [native_request(rng, 6, 2)]
    native.record(requests)
    (request,) = requests
    before = request["codes"].copy()
    arrays = [request[name] for name in native.names]
    batch = native.staging.fill(arrays, 1, native.outputs)
    assert batch is not None
    request["codes"] += 1
    request["dense"] += 1
    batch.look_up()
    found = dict(zip(native.outputs, batch.run.run(), strict=True))
    np.testing.assert_array_equal(found["b"], vectors[before])
    np.testing.assert_array_equal(found["dense"], request["dense"])


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory, vectors: NDArray[np.float32]) -> Model:
    """A user with clicks, and items, whose keys are narrow."""
    folder = tmp_path_factory.mktemp("table") / "t"
    write_table(folder, [vectors])
    table = TableSpec("t", "t", len(vectors), 3, keys="row_number")
    lookups = (
        LookupSpec("t", "user", "u"),
        LookupSpec("t", "clicks", "h", pooling="sum"),
        LookupSpec("t", "item", "i"),
    )
    spec = ModelSpec(
        inputs=(
            TensorSpec("user", "int64", (-1,), context=True),
            TensorSpec("item", "int32", (-1,)),
            TensorSpec("clicks", "int64", (-1, 3), context=True),
            TensorSpec("price", "float32", (-1, 2)),
            TensorSpec("age", "float32", (-1, 1), context=True),
        ),
        outputs=(TensorSpec("price", "float32", (-1, 2)),),
        tables=(table,),
        lookups=lookups,
        ranking=RankingSpec(lookups=lookups),
    )
    return Model(spec, [TableFile.open(folder, table)], ("price", "age", ROW_CONTEXT, BLOCK_CONTEXT))


def ranking_request(rng: np.random.Generator, num_candidates: int) -> Inputs:
    return {
        "user": rng.integers(0, 50, 1),
        "item": rng.integers(0, 50, num_candidates).astype(np.int32),
        "clicks": rng.integers(0, 50, (1, 3)),
        "price": rng.random((num_candidates, 2), np.float32),
        "age": rng.random((1, 1), np.float32),
    }


@pytest.mark.parametrize("replayed", [(), ((1, 8),), ((4, 9),), ((3, 4), (4, 9))])
def test_requests_of_one_context_are_answered(
    ranking: Model, vectors: NDArray[np.float32], replayed: tuple[tuple[int, int], ...]
) -> None:
    """One request or several with as many candidates each, also where the batch is filled up."""
    rng = np.random.default_rng(2)
    assert isinstance(ranking.layout, RankingLayout)
    ranking.layout.replayed = replayed
    pool = stage_on_gpu(ranking.network.spec, ranking.layout, ranking.network)
    assert pool is not None
    ranking.staging = pool.new()
    for sizes in ([4], [7], [4, 4], [2, 2, 2], [9, 9, 9, 9]):
        requests = [ranking_request(rng, size) for size in sizes]
        ranking.record(requests)
        for _ in range(2):
            requests = [ranking_request(rng, size) for size in sizes]
            arrays = [inputs[name] for inputs in requests for name in ranking.names]
            batch = ranking.staging.fill(arrays, len(requests), ranking.outputs)
            assert batch is not None
            assert (batch.counts.tolist(), batch.num_samples, batch.num_contexts) == (sizes, sum(sizes), len(sizes))
            batch.look_up()
            assert not batch.lookup.num_unknown.any()
            found = dict(zip(ranking.outputs, batch.run.run(), strict=True))
            joined = {name: np.concatenate([inputs[name] for inputs in requests]) for name in ranking.names}
            places = np.arange(sum(sizes)) if batch.output_rows is None else batch.output_rows
            np.testing.assert_array_equal(found["i"][places], vectors[joined["item"]])
            np.testing.assert_array_equal(found["price"][places], joined["price"])
            owners = found[ROW_CONTEXT][places]
            np.testing.assert_array_equal(owners, np.repeat(np.arange(len(sizes)), sizes))
            np.testing.assert_array_equal(found["u"][: len(sizes)], vectors[joined["user"]])
            np.testing.assert_allclose(found["h"][: len(sizes)], vectors[joined["clicks"]].sum(axis=1), rtol=1e-5)
            np.testing.assert_array_equal(found["age"][: len(sizes)], joined["age"])
            assert len(found["u"]) == len(found[BLOCK_CONTEXT])


@pytest.mark.parametrize("sizes", [(4, 5), (0, 0), (3, 0)])
def test_requests_of_different_numbers_take_the_other_way(ranking: Model, sizes: tuple[int, ...]) -> None:
    """They are not blocks of one length."""
    rng = np.random.default_rng(3)
    assert ranking.answer([ranking_request(rng, size) for size in sizes]) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"ids": np.zeros((3, 3), np.int64)},
        {"ids": np.zeros((2, 2), np.int64)},
        {"codes": np.zeros(3, np.int64)},
        {"bags": np.zeros((3, 8), np.int64)[:, ::2]},
        {"dense": [[0.0, 0.0]] * 3},
        {"dense": np.zeros((3, 2, 1), np.float32)},
    ],
)
def test_other_arrays_are_left_to_the_other_way(native: Model, changed: dict[str, Any]) -> None:
    """Of another shape, type or order in memory, or none at all."""
    rng = np.random.default_rng(2)
    native.record([native_request(rng, 3, 4)])
    assert native.answer([native_request(rng, 3, 4)]) is not None
    assert native.answer([{**native_request(rng, 3, 4), **changed}]) is None


@pytest.fixture(scope="module", params=[("int64", False), ("uint32", False), ("int64", True)], ids=str)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Source]:
    """A model of HugeCTR's with two tables of 2 and 3 slots; its network reads a concat input or not."""
    key_type, joined = request.param
    source = Source(tmp_path_factory.mktemp("packed") / "source", (400, 500))
    source.settings["supportlonglong"] = key_type == "int64"
    (report,) = import_hugectr(source.ps_json(), source.folder / "repository")
    version = VersionDirectory.read(report.version_dir)
    given = (version.spec.layout_options["dense_input"],)
    return Model(version.spec, version.open_tables(), given, joined=joined), source


def packed_request(model: Model, rng: np.random.Generator, samples: int) -> Inputs:
    keys = rng.integers(0, 1000, 5 * samples).astype(model.layout.format.key_type)  # type: ignore[attr-defined]
    offsets = [*range(2 * samples + 1), *range(3 * samples + 1)]
    return {
        "DES": rng.random((1, 2 * samples), np.float32),
        "CATCOLUMN": keys[None],
        "ROWINDEX": np.array([offsets], np.int32),
    }


def test_packed_requests_with_one_key_per_slot_are_answered(packed: tuple[Model, Source]) -> None:
    """The keys of each table out of those of all samples, in one request or several."""
    model, source = packed
    rng = np.random.default_rng(3)
    tables = [
        dict(zip(keys.tolist(), rows, strict=True)) for keys, rows in zip(source.keys, source.vectors, strict=True)
    ]
    defaults = np.full(1, 0.25, np.float32), np.full(4, -1, np.float32)
    for sizes in ((4,), (1, 3, 2)):
        model.record([packed_request(model, rng, samples) for samples in sizes])
        requests = [packed_request(model, rng, samples) for samples in sizes]
        found = model.answer(requests)
        assert found is not None
        keys = np.concatenate([inputs["CATCOLUMN"].reshape(-1, 5) for inputs in requests])
        for table, (name, columns) in enumerate((("wide", slice(2)), ("deep", slice(2, 5)))):
            expected = [[tables[table].get(key, defaults[table]) for key in row] for row in keys[:, columns].tolist()]
            np.testing.assert_array_equal(found[name], np.array(expected))
        dense = np.concatenate([inputs["DES"].reshape(-1, 2) for inputs in requests])
        np.testing.assert_array_equal(found["dense"], dense)


def test_packed_requests_of_another_kind_are_left_to_the_other_way(packed: tuple[Model, Source]) -> None:
    """Bags of other lengths, sizes that do not agree, wrong types, several dimensions."""
    model, _ = packed
    rng = np.random.default_rng(4)
    model.record([packed_request(model, rng, 2)])
    good = packed_request(model, rng, 2)
    assert model.answer([good]) is not None
    others = [
        {"ROWINDEX": np.array([[0, 2, 2, 3, 4, *range(7)]], np.int32)},
        {"ROWINDEX": good["ROWINDEX"][:, :-1]},
        {"ROWINDEX": good["ROWINDEX"].astype(np.int64)},
        {"ROWINDEX": good["ROWINDEX"].reshape(2, 6)},
        {"CATCOLUMN": good["CATCOLUMN"][:, :-1]},
        {"CATCOLUMN": good["CATCOLUMN"].astype(np.int32)},
        {"DES": np.zeros((1, 3), np.float32)},
        {"DES": np.float32(1)},
    ]
    for changed in others:
        assert model.answer([{**good, **changed}]) is None


@pytest.mark.parametrize("by_column", [0, 1])
@pytest.mark.parametrize(("dtype", "conversion"), [("int64", SAME), ("int32", SAME), ("uint32", FROM_UINT32)])
def test_columns_are_copied_beside_each_other_or_apart(dtype: str, conversion: int, by_column: int) -> None:
    """Some columns of a matrix, of all requests one after the other."""
    matrices = [(np.arange(5 * n).reshape(n, 5) + 2**31 - 9 * n).astype(dtype) for n in (2, 3)]
    wanted = np.zeros((3, 5) if by_column else (5, 3), np.int64 if conversion != SAME else dtype)
    copy = np.zeros(1, COPY)
    copy["address"], copy["element_bytes"] = wanted.ctypes.data, matrices[0].itemsize
    copy["conversion"] = conversion
    copy["to_next_element"], copy["to_next_sample"] = (5, 1) if by_column else (1, 3)
    copy["row_elements"], copy["first"], copy["num"] = 5, 1, 3

    gather(id(matrices), 2, 1, 2, 5, np.array([2, 3]), copy)

    expected = np.concatenate(matrices)[:, 1:4]
    np.testing.assert_array_equal(wanted.T if by_column else wanted, expected)
