"""Row reads in the main graph: what is carved out, under which keys, and what stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from inference_session import InferenceSession
from inference_session.errors import HotrowError, InvalidRequestError, ModelFormatError
from inference_session.importers.onnx import import_onnx, importer
from inference_session.importers.onnx.carve import carve
from inference_session.onnx_graphs import bodies
from tests.testing.example_models import ExampleModels
from tests.testing.onnx_evaluation import evaluate
from tests.testing.onnx_models import assert_same, check, import_model, model_of, table

KEYS = np.array([[0, 1], [999, -1], [-1000, 7]], np.int64)
ONE = "m (int64[b, 2] keys) => (float[b, 2, 4] y) { y = Gather(w, keys) }"


def test_a_table_may_be_called_as_the_folder_of_another(tmp_path: Path) -> None:
    """Folders get names of their own, and each table its own rows."""
    graph = """m (int64[b, 2] keys) => (float[b, 2, 7] y) {
        u = Gather(w, keys)  v = Gather(x, keys)  y = Concat<axis = 2>(u, v) }"""
    model = model_of(graph, {"w": table(), "x": table(1200, 3)})
    for old, new in (("w", "a/b"), ("x", "a_b")):
        for tensor in model.graph.initializer:
            tensor.name = new if tensor.name == old else tensor.name
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]

    report = check(tmp_path, model, {"keys": KEYS})

    assert [(t.name, t.folder, t.num_rows) for t in report.tables] == [("a/b", "a_b", 1000), ("a_b", "a_b_2", 1200)]


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        ("y = GatherND(w, keys)", "is read by GatherND 'y', which is not a Gather"),
        ("v = Gather(q, keys)  y = Cast<to = 1>(v)", "holds int8; tables hold float32, float16 or bfloat16"),
    ],
)
def test_a_table_that_is_read_in_another_way_is_named(reading: str, reason: str, tmp_path: Path) -> None:
    """It stays in the dense network, answers are the original's, and the report says why."""
    graph = f"m (int64[b, 1] keys) => (float y) {{ {reading} }}"
    weight = "q" if "q" in reading else "w"
    rows = np.arange(-4000, 4000).astype(np.int8).reshape(2000, 4) if weight == "q" else table()

    report = check(tmp_path, model_of(graph, {weight: rows}), {"keys": KEYS[:, :1]})

    assert [(item.name, item.reason) for item in report.stays_dense] == [(weight, reason)]


def test_a_row_read_becomes_a_lookup_of_the_model_input(tmp_path: Path) -> None:
    """A Gather of an input's keys needs no network to compute keys."""
    report = check(tmp_path, model_of(ONE, {"w": table()}), {"keys": KEYS})

    assert [(t.name, t.num_rows, t.embedding_dim, t.keys) for t in report.tables] == [("w", 1000, 4, "row_number")]
    assert [lookup.keys for lookup in report.spec.lookups] == ["keys"]
    assert not (report.version_dir / "keys.onnx").exists()


@settings(max_examples=20)
@given(keys=hnp.arrays(np.int64, st.tuples(st.integers(0, 5), st.just(2)), elements=st.integers(-1000, 999)))
def test_keys_in_range_answer_as_the_original(tmp_path_factory: pytest.TempPathFactory, keys: np.ndarray) -> None:
    """Any keys that ONNX Runtime takes, negative ones and no samples at all included, give the same answer."""
    path = tmp_path_factory.mktemp("import")
    graph = """m (int64[b, 2] keys) => (float[b, 8] y, float[b, 4] p) {
        v = Gather(w, keys)  shape = Constant<value = int64[2] {-1, 8}>()  y = Reshape(v, shape)
        axes = Constant<value = int64[1] {1}>()  u = Gather(w2, keys)  p = ReduceSum<keepdims = 0>(u, axes) }"""

    check(path, model_of(graph, {"w": table(), "w2": table(seed=1)}), {"keys": keys})


def test_int32_and_one_dimensional_keys(tmp_path: Path) -> None:
    """Keys of int32, one per sample, are looked up as they are."""
    graph = "m (int32[b] keys) => (float[b, 4] y) { y = Gather(w, keys) }"

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0].astype(np.int32)})

    assert report.spec.inputs[0].dtype == "int32"
    assert report.spec.batched


def test_casts_and_reshapes_of_keys_need_no_network(tmp_path: Path) -> None:
    """Changes of only the keys' shape or integer type are applied to the vectors instead, or dropped."""
    graph = """m (int32[b, 1] keys) => (float[b, 4] y) {
        k = Cast<to = 7>(keys)  one = Constant<value = int64[1] {1}>()  s = Squeeze(k, one)  y = Gather(w, s) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, :1].astype(np.int32)})

    assert report.spec.lookups[0].keys == "keys"
    assert not (report.version_dir / "keys.onnx").exists()


def test_keys_computed_in_the_graph_come_from_a_network_of_their_own(tmp_path: Path) -> None:
    """Shifted, clipped and hashed keys are computed by keys.onnx, and the dense network lacks that part."""
    graph = """m (int64[b, 2] keys, float[b, 4] x) => (float[b, 4] y) {
        o = Constant<value = int64[2] {0, 500}>()  n = Constant<value = int64 {500}>()
        h = Mod(keys, n)  k = Add(h, o)  v = Gather(w, k)  a = Constant<value = int64[1] {1}>()
        s = ReduceMean<keepdims = 0>(v, a)  y = Add(s, x) }"""
    inputs = {"keys": KEYS * 77, "x": np.ones((3, 4), np.float32)}

    report = check(tmp_path, model_of(graph, {"w": table()}), inputs)

    assert (report.version_dir / "keys.onnx").exists()
    assert report.spec.lookups[0].keys not in ("keys", "x")
    assert len(report.spec.inputs) == 2


def test_one_table_read_by_several_lookups_is_stored_once(tmp_path: Path) -> None:
    """Two Gathers of one initializer give one table and two look-ups."""
    graph = """m (int64[b] a, int64[b] c) => (float[b, 4] y) {
        u = Gather(w, a)  v = Gather(w, c)  y = Mul(u, v) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"a": KEYS[:, 0], "c": KEYS[:, 1]})

    assert len(report.tables) == 1
    assert len(report.spec.lookups) == 2


@pytest.mark.parametrize("as_whole", [False, True])
def test_half_precision_tables_stay_half(tmp_path: Path, as_whole: bool) -> None:
    """A float16 table, cast after the look-up or as a whole before it, is stored as float16."""
    read = "c = Cast<to = 1>(w)  y = Gather(c, keys)" if as_whole else "v = Gather(w, keys)  y = Cast<to = 1>(v)"
    graph = f"m (int64[b, 2] keys) => (float[b, 2, 4] y) {{ {read} }}"

    report = check(tmp_path, model_of(graph, {"w": table(dtype=np.float16)}), {"keys": KEYS})

    assert report.tables[0].dtype == "float16"
    assert (report.version_dir / "tables/w/emb_vector").stat().st_size == 1000 * 4 * 2


def test_half_precision_vectors_feed_half_precision_networks(tmp_path: Path) -> None:
    """A network that computes in float16 gets float16."""
    graph = "m (int64[b, 2] keys) => (float16[b, 2, 4] y) { v = Gather(w, keys)  y = Neg(v) }"

    check(tmp_path, model_of(graph, {"w": table(dtype=np.float16)}), {"keys": KEYS})


@pytest.mark.parametrize("shape", [(1000,), (1000, 2, 3)])
def test_rows_of_any_rank(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Rows may be single numbers or matrices."""
    sizes = "".join(f", {size}" for size in shape[1:])
    graph = f"m (int64[b, 2] keys) => (float[b, 2{sizes}] y) {{ y = Gather(w, keys) }}"
    weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    report = check(tmp_path, model_of(graph, {"w": weights}), {"keys": KEYS})

    assert report.tables[0].row_shape == shape[1:]


def test_gather_nd_by_whole_rows_is_a_lookup(tmp_path: Path) -> None:
    """PyTorch writes `weight[keys]` as GatherND."""
    graph = """m (int64[b] keys) => (float[b, 4] y) {
        a = Constant<value = int64[1] {-1}>()  k = Unsqueeze(keys, a)  y = GatherND(w, k) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0]})

    assert report.spec.lookups[0].keys == "keys"


def test_gather_nd_by_a_new_axis_of_tensorflow_is_a_lookup(tmp_path: Path) -> None:
    """`gather_nd(weight, keys[..., None])`: tf2onnx counts the axis from the front, and takes a Slice of all keys."""
    graph = """m (int64[b, 2] keys) => (float[b, 2, 4] y) {
        a = Constant<value = int64[1] {2}>()  u = Unsqueeze(keys, a)  z = Constant<value = int32[2] {0, 0}>()
        e = Constant<value = int32[2] {1000000000, 1000000000}>()  x = Constant<value = int32[2] {0, 2}>()
        s = Constant<value = int32[2] {1, 1}>()  k = Slice(u, z, e, x, s)  y = GatherND(w, k) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS})

    assert report.spec.lookups[0].keys == "keys"
    assert report.spec.joinable


@pytest.mark.parametrize(("sizes", "is_row"), [("1, 4", True), ("1, 3", False)])
def test_gather_elements_of_whole_rows_is_a_lookup(tmp_path: Path, sizes: str, is_row: bool) -> None:
    """`torch.gather` with keys that are repeated for each element of a row; of fewer elements it stays dense."""
    graph = f"""m (int64[b] keys) => (float[b, d] y) {{
        a = Constant<value = int64[1] {{1}}>()  u = Unsqueeze(keys, a)  s = Constant<value = int64[2] {{{sizes}}}>()
        k = Expand(u, s)  y = GatherElements<axis = 0>(w, k) }}"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0]}, {"keys": KEYS[:1, 0]})

    assert [lookup.keys for lookup in report.spec.lookups] == ["keys"] * is_row


@pytest.mark.parametrize(("size", "is_row"), [("1, 4", True), ("1, 3", False), ("2, 4", False)])
def test_slices_of_one_row_are_lookups(tmp_path: Path, size: str, is_row: bool) -> None:
    """JAX reads a row by a Slice from the key on; one that takes anything else stays dense."""
    graph = f"""m (int64[1] key) => (float[n, d] y) {{
        z = Constant<value = int64[1] {{0}}>()  s = Concat<axis = 0>(key, z)
        n = Constant<value = int64[2] {{{size}}}>()
        e = Add(s, n)  a = Constant<value = int64[2] {{0, 1}}>()  r = Slice(w, s, e, a)
        v = Gather(w, key)  y = Concat<axis = 1>(r, ROWS) }}""".replace("ROWS", "v" if size[0] == "1" else "r")

    report = check(tmp_path, model_of(graph, {"w": table()}), {"key": np.array([7])})

    assert bool(report.tables) == is_row


def test_a_table_may_be_asked_for_its_shape(tmp_path: Path) -> None:
    """Shape of an initializer is a constant, and no reason to keep the table."""
    graph = """m (int64[b] keys) => (float[b, 4] y) {
        s = Shape(w)  z = Constant<value = int64 {0}>()  n = Gather(s, z)  k = Mod(keys, n)  y = Gather(w, k) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0] + 5000})

    assert len(report.tables) == 1


def test_constant_nodes_are_tables_too(tmp_path: Path) -> None:
    """A table may be the value of a Constant node."""
    model = model_of(ONE, {})
    value = helper.make_tensor("w", TensorProto.FLOAT, [1000, 4], table().ravel())
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=value))

    report = check(tmp_path, model, {"keys": KEYS})

    assert report.tables[0].name == "w"


def test_float_data_are_written_as_raw_vectors(tmp_path: Path) -> None:
    """Tensors that spell out their floats, and float16 in int32_data, are understood."""
    graph = """m (int64[b, 2] keys) => (float[b, 2, 4] y, float16[b, 2, 4] h) {
        y = Gather(w, keys)  h = Gather(u, keys) }"""
    model = model_of(graph, {})
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1000, 4], table().ravel()))
    model.graph.initializer.append(helper.make_tensor("u", TensorProto.FLOAT16, [1000, 4], table(seed=1).ravel()))

    report = check(tmp_path, model, {"keys": KEYS})

    assert len(report.tables) == 2


def test_constant_keys_are_read_once(tmp_path: Path) -> None:
    """Rows that no request chooses become part of the dense network."""
    graph = """m (int64[b] keys) => (float[b, 4] y) {
        c = Constant<value = int64 {3}>()  u = Gather(w, c)  v = Gather(w, keys)  y = Add(u, v) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0]})

    assert len(report.spec.lookups) == 1


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ("v = Gather(w, keys)  t = Transpose(w)  y = MatMul(v, t)", "is read completely by Transpose"),
        ("y = Gather(w, keys)  out = Identity(w)", "is an output of a graph"),
    ],
)
def test_tied_weights_stay_dense(tmp_path: Path, graph: str, reason: str) -> None:
    """An initializer that is used as a whole as well stays in the dense network, and the report says why."""
    outputs = "float[b, 2, n] y" + (", float[1000, 4] out" if "out" in graph else "")
    model = model_of(f"m (int64[b, 2] keys) => ({outputs}) {{ {graph} }}", {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS})

    assert not report.tables
    assert reason in report.stays_dense[0].reason


def test_keys_that_depend_on_vectors_keep_their_table_dense(tmp_path: Path) -> None:
    """A second look-up by what the first one found is not separable; the first one is."""
    graph = """m (int64[b] keys) => (float[b, 4] y) {
        a = Gather(w, keys)  k = ArgMax<axis = 1, keepdims = 0>(a)  y = Gather(u, k) }"""

    report = check(tmp_path, model_of(graph, {"w": table(), "u": table(seed=1)}), {"keys": KEYS[:, 0]})

    assert [t.name for t in report.tables] == ["w"]
    assert report.stays_dense[0].name == "u"
    assert "depend on looked-up vectors" in report.stays_dense[0].reason


def test_a_table_that_computes_keys_of_a_larger_one_stays_dense(tmp_path: Path) -> None:
    """Such as the bounds of a bucketize: one of the two has to, and the larger one gains more as a table."""
    graph = """m (int64[b] keys) => (float[b, 4] y) {
        a = Gather(w, keys)  k = Cast<to = 7>(a)  y = Gather(u, k) }"""
    bounds = np.arange(1000, 0, -1).astype(np.float32)

    report = check(tmp_path, model_of(graph, {"w": bounds, "u": table(1001)}), {"keys": KEYS[:, 0]})

    assert [t.name for t in report.tables] == ["u"]
    assert [(item.name, item.reason) for item in report.stays_dense] == [
        ("w", "is read to compute keys ('k') of 'u', which is larger")
    ]


def test_positions_counted_from_the_shape_of_vectors(tmp_path: Path) -> None:
    """Reading the shape of looked-up vectors does not depend on their values."""
    graph = """m (int64[b, l] keys) => (float[b, l, 4] y) {
        a = Gather(w, keys)  s = Shape(a)  o = Constant<value = int64 {1}>()  n = Gather(s, o)
        z = Constant<value = int64 {0}>()  r = Range(z, n, o)  p = Gather(u, r)  y = Add(a, p) }"""

    report = check(tmp_path, model_of(graph, {"w": table(), "u": table(seed=1)}), {"keys": KEYS}, {"keys": KEYS[:, :1]})

    assert [t.name for t in report.tables] == ["w", "u"]
    assert report.spec.joinable


def test_small_and_double_tables_stay_dense(tmp_path: Path) -> None:
    """Few rows, or elements that tables do not hold, keep an initializer in the dense network."""
    graph = """m (int64[b] keys) => (float[b, 4] y, double[b, 4] z) { y = Gather(w, keys)  z = Gather(u, keys) }"""
    model = model_of(graph, {"w": table(999), "u": table(dtype=np.float64)})

    report = check(tmp_path, model, {"keys": KEYS[:2, 0] % 900})

    assert {item.name: item.reason for item in report.stays_dense} == {
        "w": "has 999 rows, fewer than 1000",
        "u": "holds double; tables hold float32, float16 or bfloat16",
    }
    assert not report.tables


def test_min_rows_decides_what_is_small(tmp_path: Path) -> None:
    """With a lower limit the same initializer is a table."""
    assert check(tmp_path, model_of(ONE, {"w": table(7)}), {"keys": KEYS[:1]}, min_rows=7).tables


def test_names_may_hold_any_characters(tmp_path: Path) -> None:
    """Names with slashes, spaces and dots, and two that give the same folder, work."""
    model = model_of(
        "m (int64[b] k) => (float[b, 4] y) { u = Gather(w, k)  v = Gather(x, k)  y = Sub(u, v) }",
        {"w": table(), "x": table(seed=1)},
    )
    for tensor, name in zip(model.graph.initializer, ("../a b/ü", "..-a b.ü"), strict=True):
        node = next(n for n in model.graph.node if tensor.name in n.input)
        tensor.name = node.input[0] = name
    model.graph.input[0].name = "tables/k 1"
    for node in model.graph.node[:2]:
        node.input[1] = "tables/k 1"

    report = check(tmp_path, model, {"tables/k 1": KEYS[:, 0]})

    assert [t.name for t in report.tables] == ["../a b/ü", "..-a b.ü"]
    assert len({t.folder for t in report.tables}) == 2


def test_dead_inputs_are_kept_in_the_interface(tmp_path: Path) -> None:
    """An input that only the keys need leaves the dense network, not the model."""
    report = check(tmp_path, model_of(ONE, {"w": table()}), {"keys": KEYS})

    assert [i.name for i in report.spec.inputs] == ["keys"]


def test_a_model_without_inputs(tmp_path: Path) -> None:
    """It answers every request alike."""
    check(tmp_path, model_of("m () => (float[2, 4] y) { y = Gather(w, k) }", {"w": table(), "k": np.arange(2)}), {})


def test_functions_are_inlined(tmp_path: Path) -> None:
    """A look-up inside a model-local function is found."""
    text = """<ir_version: 8, opset_import: ["" : 18, "f" : 1]>
        m (int64[b] keys) => (float[b, 4] y) { y = f.embed(w, keys) }
        <domain: "f", opset_import: ["" : 18]> embed (t, k) => (v) { v = Gather(t, k) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(table(), "w"))

    assert len(check(tmp_path, model, {"keys": KEYS[:, 0]}).tables) == 1


def test_initializers_listed_as_inputs_are_no_inputs(tmp_path: Path) -> None:
    """Old models list initializers among their inputs."""
    model = model_of(ONE, {"w": table()}, opset=11)
    model.ir_version = 3
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [1000, 4]))

    report = check(tmp_path, model, {"keys": KEYS})

    assert [i.name for i in report.spec.inputs] == ["keys"]
    assert len(report.tables) == 1
    assert "optional" not in str(report)


def test_optional_inputs_keep_their_values(tmp_path: Path) -> None:
    """The report names inputs that have a value in the file, such as a temperature: requests cannot replace it."""
    graph = "m (int64[b] keys) => (float[b, 4] y) { v = Gather(w, keys)  y = Div(v, temperature) }"
    model = model_of(graph, {"w": table(), "temperature": np.array([2], np.float32)})
    model.graph.input.append(helper.make_tensor_value_info("temperature", TensorProto.FLOAT, [1]))

    report = check(tmp_path, model, {"keys": KEYS[:, 0]})

    assert [i.name for i in report.spec.inputs] == ["keys"]
    assert "requests cannot replace these: temperature" in str(report)


def test_the_report_says_why_a_model_could_not_be_run(tmp_path: Path) -> None:
    """A batch size that the export has fixed: ONNX Runtime's error names the node and the sizes."""
    graph = "m (int64[b, 2] keys) => (float[b, 8] y) { v = Gather(w, keys)  y = Reshape(v, four) }"

    report = check(tmp_path, model_of(graph, {"w": table(), "four": np.array([4, 8])}), {"keys": np.ones((4, 2), int)})

    assert len(report.tables) == 1
    assert "Reshape node" in str(report)
    assert "requested shape:{4,8}" in str(report)


def test_a_model_without_tables_is_dense_altogether(tmp_path: Path) -> None:
    """No table is no error; the report says so."""
    model = model_of("m (float[b, 4] x) => (float[b, 4] y) { y = Neg(x) }", {})

    report = check(tmp_path, model, {"x": np.ones((2, 4), np.float32)})

    assert str(report).endswith("Note: no table was taken out; everything is in the dense network")


def test_the_weight_that_may_be_meant_is_named_where_there_is_no_table(tmp_path: Path) -> None:
    """A product with one-hot rows, as from Dense layers over categories, reads no rows of its table."""
    text = "m (int64[b] k) => (float[b, 4] y) { h = OneHot(k, n, v)  y = MatMul(h, w) }"
    constants = {"n": np.array(1000), "v": np.array([0, 1], np.float32), "w": table()}

    report = check(tmp_path, model_of(text, constants), {"k": KEYS[:, 0]})

    note = "The largest weight, 'w' (1000 x 4), is read by MatMul 'y'; rows of a table are read by Gather along axis 0"
    assert note in str(report)


def test_recommenders_answer_as_expected(models: ExampleModels, tmp_path: Path) -> None:
    """Whole models, of the kinds that PyTorch and JAX write, answer as recorded."""
    for folder in models.onnx:
        report = import_onnx(folder / "model.onnx", tmp_path, folder.name)
        assert len(report.tables) == 5
        inputs = dict(np.load(folder / "requests.npz"))
        expected = dict(np.load(folder / "expected.npz"))
        declared = {i.name for i in report.spec.inputs}
        found = evaluate(report.version_dir, {k: v for k, v in inputs.items() if k in declared})
        for output, array in expected.items():
            if output in found:
                np.testing.assert_allclose(found[output], array, rtol=0, atol=1e-6)
        assert_same(report, folder / "model.onnx", {k: v for k, v in inputs.items() if k in declared})


def test_import_is_deterministic(tmp_path: Path) -> None:
    """The same model gives the same files."""
    model = model_of(ONE, {"w": table()})
    first = import_model(tmp_path, model)
    second = import_model(tmp_path, model)

    assert second.version_dir.name == "2"
    for name in ("session.json", "dense.onnx", "MANIFEST.json"):
        assert (first.version_dir / name).read_bytes() == (second.version_dir / name).read_bytes()


def test_many_predictions_are_not_all_listed(tmp_path: Path) -> None:
    """The report of a model with a column per item says how many there are."""
    graph = "agraph (int64[N] x) => (float[N, 500] y) { y = Gather(W, x) }"

    report = check(tmp_path, model_of(graph, {"W": table(dim=500)}), {"x": np.array([1, 2])})

    assert "y_0, y_1, y_2, y_3, y_4, y_5, y_6, y_7, y_8, y_9, y_10 … (500 in all)" in str(report)


def test_a_table_that_is_cast_to_half_as_a_whole_is_taken(tmp_path: Path) -> None:
    """ONNX Runtime rounds to half precision at other places than before, by no more than a step of it."""
    graph = """agraph (int64[N, 2] x) => (float16[N, 4] y) {
        h = Cast<to=10>(W) g = Gather(h, x) y = ReduceSum<keepdims=0>(g, a)
    }"""
    keys = np.random.default_rng(0).integers(0, 1000, (50, 2))

    report = import_model(tmp_path, model_of(graph, {"W": table(), "a": np.array([1])}))

    assert_same(report, tmp_path / "model.onnx", {"x": keys}, tolerance=4e-3)
    assert [t.dtype for t in report.tables] == ["float32"]


def test_types_of_other_values_are_named(tmp_path: Path) -> None:
    """PyTorch writes CastLike, of whole tables too, if it does not optimize: they stayed in the network."""
    graph = """m (int64[n, 2] ids, float[n, 4] x) => (float[n, 4] y) {
        all = CastLike(w, x) v = Gather(all, ids) s = ReduceSum<keepdims = 0>(v, one)
        zero = CastLike(none, ids) is_id = Greater(ids, zero) f = CastLike(is_id, x) c = ReduceSum(f, one)
        p = Mul(s, c) y = Add(p, x) }"""
    model = model_of(graph, {"w": table(), "one": np.array([1]), "none": np.array(0, np.int32)})
    inputs = {"ids": np.array([[0, 5], [999, 0]]), "x": np.ones((2, 4), np.float32)}

    report = check(tmp_path, model, inputs)

    assert [t.name for t in report.tables] == ["w"]
    assert [lookup.pooling for lookup in report.spec.lookups] == ["sum"]
    assert report.spec.joinable


def test_batches_that_matter_under_some_values_only_are_found(tmp_path: Path) -> None:
    """One large key changes the answers of its whole batch: such requests are not joined."""
    graph = """agraph (int64[N] x) => (float[N, 4] y) {
        m = ReduceMax<keepdims=0>(x) c = Greater(m, limit) f = Cast<to=1>(c) g = Gather(W, x) y = Add(g, f)
    }"""

    report = check(
        tmp_path,
        model_of(graph, {"W": table(), "limit": np.array(990)}),
        {"x": np.array([1, 2])},
        {"x": np.array([995, 2])},
    )

    assert report.spec.batched
    assert not report.spec.joinable


def test_answers_drawn_at_random(tmp_path: Path) -> None:
    """Noise differs from run to run; other values are compared as usual."""
    model = model_of(
        """g (int64[n, 2] ids) => (float[n, 2, 4] y, float[n, 2, 4] noisy) {
            y = Gather(t, ids)  noise = RandomNormalLike(y)  noisy = Add(y, noise) }""",
        {"t": table()},
    )

    report = import_model(tmp_path, model)

    assert len(report.tables) == 1
    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"ids": KEYS})
    np.testing.assert_array_equal(found["y"], table()[KEYS])
    assert not np.array_equal(found["noisy"], found["y"])


def test_scalars(tmp_path: Path) -> None:
    """An input and an output of no dimensions; servers that have none send the input in shape [1]."""
    model = model_of(
        """g (int64[n, 2] ids, float temperature) => (float[n, 2, 4] y, float largest) {
            v = Gather(t, ids)  y = Div(v, temperature)  largest = ReduceMax <keepdims=0> (y) }""",
        {"t": table()},
    )
    inputs = {"ids": KEYS, "temperature": np.array(2, np.float32)}

    report = check(tmp_path, model, inputs)

    with InferenceSession.open(report.version_dir) as session:
        found = session.run({**inputs, "temperature": np.array([2], np.float32)})
    np.testing.assert_allclose(found["y"], table()[KEYS] / 2, rtol=1e-6)
    assert found["largest"] == found["y"].max()


def test_small_and_large_tables_may_share_an_input(tmp_path: Path) -> None:
    """A matrix with a column per feature: generated keys have to suit the small tables in the network, too."""
    model = model_of(
        """g (int64[n, 3] ids) => (float[n, 12] y) {
            i, j, k = Split <axis=1, num_outputs=3> (ids)
            a = Gather(t, i)  b = Gather(t, j)  c = Gather(small, k)
            all = Concat <axis=1> (a, b, c)  y = Flatten(all) }""",
        {"t": table(), "small": table(rows=3)},
    )

    report = check(tmp_path, model, {"ids": np.array([[999, 0, 2], [0, 1, 1]])})

    assert [lookup.columns for lookup in report.spec.lookups] == [(0, 1), (1, 2)]
    assert not any("could not be run" in note for note in report.notes)


def test_a_scalar_may_be_a_key(tmp_path: Path) -> None:
    """One user, many items: the model is tried out at import as any other."""
    model = model_of(
        """g (int64 user, int64[n] items) => (float[n, 4] y) {
            u = Gather(t, user)  v = Gather(t, items)  y = Mul(u, v) }""",
        {"t": table()},
    )

    report = check(tmp_path, model, {"user": np.array(7), "items": KEYS[0]})

    assert not any("could not be run" in note for note in report.notes)


@pytest.mark.parametrize(
    "taken",
    [
        "all = Identity(v)",
        "s = ReduceSum(lengths)  sizes = Concat <axis=0> (s, dim)  z = ConstantOfShape(sizes)  all = Add(v, z)",
    ],
    ids=["at least", "exactly"],
)
def test_keys_with_the_lengths_of_their_parts(tmp_path: Path, taken: str) -> None:
    """As many keys as the lengths say: the two lists differ in size, although most generated ones do not fit."""
    model = model_of(
        f"""g (int64[total] values, int64[n] lengths) => (float[n, 4] y) {{
            v = Gather(t, values)  {taken}
            running = CumSum(all, axis)  so_far = Concat <axis=0> (none, running)
            ends = CumSum(lengths, axis)  begins = Sub(ends, lengths)
            upper = Gather(so_far, ends)  lower = Gather(so_far, begins)  y = Sub(upper, lower) }}""",
        {"t": table(), "axis": np.array(0), "none": np.zeros((1, 4), np.float32), "dim": np.array([4])},
    )

    check(tmp_path, model, {"values": KEYS.ravel()[:5], "lengths": np.array([2, 0, 3])})


def test_sizes_of_minus_one_are_open(tmp_path: Path) -> None:
    """As some exporters write them."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "keys"], ["y"])],
        "g",
        [helper.make_tensor_value_info("keys", TensorProto.INT64, [-1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [-1, 2, 4])],
        [numpy_helper.from_array(table(), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    report = check(tmp_path, model, {"keys": KEYS}, {"keys": KEYS[:1]})

    assert report.spec.batched
    assert report.spec.inputs[0].shape == (-1, 2)


def test_predictions_of_no_samples(tmp_path: Path) -> None:
    """They have a column per label, whatever the exporter says of the output."""
    model = model_of("g (int64[n] ids) => (float[n, width] y) { y = Gather(t, ids) }", {"t": table()})

    report = import_model(tmp_path, model)

    with InferenceSession.open(report.version_dir) as session:
        assert session.predict({"ids": KEYS[0]}).shape == (2, 4)
        assert session.predict({"ids": KEYS[0, :0]}).shape == (0, 4)
        assert session.run({"ids": KEYS[0, :0]}, ["y"])["y"].shape == (0, 4)


def test_keys_stay_what_they_are_where_the_graph_makes_them_int32(tmp_path: Path) -> None:
    """ONNX Runtime takes their low 32 bits, and so the row of another key."""
    model = model_of("g (int64[n] ids) => (float[n, 4] y) { k = Cast<to=6>(ids) y = Gather(t, k) }", {"t": table()})

    report = import_model(tmp_path, model)

    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"ids": np.array([3, 3 + 2**32, -1])}, ["y"])["y"]
        np.testing.assert_array_equal(found, [table()[3], np.zeros(4), table()[-1]])
        assert session.stats()["tables"]["t"]["default_vectors"] == 1


SEVEN = """g (int64[n] ids) => (float[n, 4] y, float[{length}] z) {{
    v = Gather(t, ids) y = Add(v, seven) z = Identity(four) }}"""
"""Takes no generated requests: only those of 1 or 7 samples."""


def test_an_output_of_fixed_length_has_no_row_for_each_sample(tmp_path: Path) -> None:
    """The declaration says so, where the model cannot be run on generated inputs."""
    constants = {"t": table(), "seven": table(rows=7), "four": np.arange(4, dtype=np.float32)}
    report = import_model(tmp_path, model_of(SEVEN.format(length=4), constants))

    assert any("could not be run" in note for note in report.notes)
    assert not report.spec.batched
    with InferenceSession.open(report.version_dir) as session:
        found = session.run({"ids": np.arange(7)}, ["y", "z", "OUTPUT0"])
    np.testing.assert_array_equal(found["y"], table()[:7] + table(rows=7))
    np.testing.assert_array_equal(found["z"], constants["four"])
    np.testing.assert_array_equal(found["OUTPUT0"], found["y"])


def test_predictions_of_outputs_of_different_lengths_are_an_error(tmp_path: Path) -> None:
    """The declarations promise a row of each for each sample."""
    constants = {"t": table(), "seven": table(rows=7), "four": np.arange(4, dtype=np.float32)}
    report = import_model(tmp_path, model_of(SEVEN.format(length="n"), constants))

    message = r"OUTPUT0 cannot be made of outputs of different lengths: \[7, 4\], \[4\]"
    with InferenceSession.open(report.version_dir) as session, pytest.raises(HotrowError, match=message):
        session.predict({"ids": np.arange(7)})


@pytest.mark.parametrize("order", ["c, y, f", "y, f, c"])
def test_outputs_without_a_row_for_each_sample_are_no_predictions(tmp_path: Path, order: str) -> None:
    """A constant, or the elements of all samples in one list, as runs show: sizes without a name promise nothing."""
    declared = ", ".join(f"float[{'?, ?' if name == 'y' else '?'}] {name}" for name in order.split(", "))
    graph = f"g (int64[n] ids) => ({declared}) {{ y = Gather(t, ids) f = Reshape(y, all) c = Identity(four) }}"
    constants = {"t": table(dim=2), "all": np.array([-1]), "four": np.arange(4, dtype=np.float32)}

    report = import_model(tmp_path, model_of(graph, constants))

    assert report.spec.label_outputs == ("y",)
    with InferenceSession.open(report.version_dir) as session:
        np.testing.assert_array_equal(session.predict({"ids": np.arange(3)}), constants["t"][:3])


DLRM = """g (float[batch, 4] dense, int64[2, batch] offsets, int64[n] keys) => (float[batch, 4] y) {
    z = Constant <value = int64 {0}> ()  first = Gather <axis=0> (offsets, z)
    picked = Gather (keys, first)  v = Gather (t, picked)  y = Add (dense, v) }"""


def test_sizes_of_one_name_are_equal(tmp_path: Path) -> None:
    """Offsets and dense features, as in DLRM: sizes that do not fit together are refused, and the inputs named."""
    offsets, keys = np.array([[0, 2], [1, 2]]), np.array([5, 6, 999])
    inputs = {"dense": np.ones((2, 4), np.float32), "offsets": offsets, "keys": keys}

    report = check(tmp_path, model_of(DLRM, {"t": table()}), inputs)

    assert report.spec.equal_sizes == ((("dense", 0), ("offsets", 1)),)
    assert not any("generated" in note for note in report.notes)
    message = r"input 'offsets' has shape \[2, 0\], but 'dense' has \[2, 4\]: dimension 1 of 'offsets' and dimension 0"
    with InferenceSession.open(report.version_dir) as session, pytest.raises(InvalidRequestError, match=message):
        session.run({**inputs, "offsets": offsets[:, :0]})


def test_sizes_of_one_name_that_need_not_be_equal(tmp_path: Path) -> None:
    """Exporters also give meaningless names: sizes that the model accepts in a trial are not refused up front."""
    graph = """g (int64[n] a, int64[n] b) => (float[1, 4] y) {
        z = Constant <value = int64[1] {0}> ()  u = Gather(t, a)  v = Gather(t, b)
        p = ReduceSum(u, z)  q = ReduceSum(v, z)  y = Add(p, q) }"""

    report = check(tmp_path, model_of(graph, {"t": table()}), {"a": KEYS[0], "b": KEYS[1]})

    assert report.spec.equal_sizes == ()


def test_keys_and_offsets_of_one_symbol(tmp_path: Path) -> None:
    """Exporters give both the name of the batch: requests may have more keys than offsets all the same."""
    graph = """g (int64[batch] keys, int64[batch] ends) => (float[batch, 4] y) {
        z = Constant <value = int64 {0}> ()  v = Gather(t, keys)  s = CumSum(v, z)  y = Gather(s, ends) }"""
    inputs = {"keys": KEYS.ravel(), "ends": np.array([1, 3, 5, 5])}

    report = check(tmp_path, model_of(graph, {"t": table()}), inputs)

    assert not report.spec.batched


def test_a_size_that_is_also_the_number_of_samples(tmp_path: Path) -> None:
    """A request of a square matrix is valid, and no other one can be joined to it."""
    graph = """g (int64[n, n] keys, float[n] x) => (float[n, 4] y) {
        one = Constant <value = int64[1] {1}> ()  v = Gather(t, keys)  s = ReduceSum <keepdims = 0> (v, one)
        u = Unsqueeze(x, one)  y = Add(s, u) }"""
    inputs = {"keys": KEYS[:2], "x": np.ones(2, np.float32)}

    report = check(tmp_path, model_of(graph, {"t": table()}), inputs)

    assert not report.spec.batched


def test_a_model_that_is_taken_apart_wrongly_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a mistake of the importer a model has no tables, but right answers: here, look-ups swap their keys."""

    def carve_wrongly(*args: Any, **options: Any) -> Any:
        carved = carve(*args, **options)
        first, second = carved.lookups
        first.keys, second.keys = second.keys, first.keys
        return carved

    monkeypatch.setattr(importer, "carve", carve_wrongly)
    graph = "m (int64[b] a, int64[b] c) => (float[b, 4] y) { u = Gather(w, a)  v = Gather(x, c)  y = Sub(u, v) }"

    report = check(tmp_path, model_of(graph, {"w": table(), "x": table(seed=1)}), {"a": KEYS[0], "c": KEYS[1]})

    assert not report.tables
    assert [item.name for item in report.stays_dense] == ["w", "x"]
    assert not (report.version_dir / "tables").exists()


def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chain: str, length: int) -> int:
    """How many nodes an import looks at, all its passes together, of a key behind a chain of nodes."""
    looked_at = 0

    def counted(node: onnx.NodeProto) -> list[onnx.GraphProto]:
        nonlocal looked_at
        looked_at += 1
        return bodies(node)

    steps = " ".join(f"a{i + 1} = {chain.format(f'a{i}')}" for i in range(length))
    graph = f"m (int64[b] a0) => (float[b, 4] y) {{ {steps} y = Gather(w, a{length}) }}"
    with monkeypatch.context() as patch:
        patch.setattr("inference_session.onnx_graphs.bodies", counted)
        (tmp_path / str(length)).mkdir()
        constants = {"w": table(), "zero": np.array(0)} if "zero" in chain else {"w": table()}
        report = import_model(tmp_path / str(length), model_of(graph, constants))
    assert [found.name for found in report.tables] == ["w"]
    return looked_at


@pytest.mark.parametrize("chain", ["Identity({})", "Add({}, zero)"])
def test_a_long_chain_takes_an_import_as_long_as_its_length(
    chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the nodes are twice the work, not four times."""
    short, long = (work(monkeypatch, tmp_path, chain, length) for length in (400, 800))

    assert long < 2.2 * short


@pytest.mark.parametrize(
    "nodes",
    [
        "k = Identity(k)",
        "k = Identity(j) j = Identity(k)",
        "k = Add(k, keys)",
        "k = Cast<to = 7>(v) v = Gather(w, k)",
    ],
)
def test_values_that_depend_on_themselves_are_refused(tmp_path: Path, nodes: str) -> None:
    """The importer follows values back to their origin; such a value does not have one."""
    model = model_of(f"m (int64[b] keys) => (float[b, 4] y) {{ {nodes} y = Gather(w, k) }}", {"w": table()})

    with pytest.raises(ModelFormatError, match="depend on themselves: "):
        import_model(tmp_path, model)


def test_a_body_whose_values_depend_on_themselves_is_refused(tmp_path: Path) -> None:
    """In a Loop as well."""
    graph = """m (int64[b] keys, int64 n, bool go) => (float[b, 4] y) {
        k = Loop(n, go, keys) <body = l (int64 i, bool c, int64[b] x) => (bool d, int64[b] z)
        { d = Identity(c) z = Identity(q) q = Identity(z) }> y = Gather(w, k) }"""

    with pytest.raises(ModelFormatError, match="depend on themselves"):
        import_model(tmp_path, model_of(graph, {"w": table()}))


def test_nodes_may_come_in_any_order(tmp_path: Path) -> None:
    """ONNX Runtime sorts them, and so does the importer."""
    graph = "m (int64[b] keys) => (float[b, 4] y) { y = Gather(w, k) k = Add(j, keys) j = Identity(keys) }"

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": np.array([1, 2, 400])})

    assert [found.name for found in report.tables] == ["w"]


def test_outputs_of_strings(tmp_path: Path) -> None:
    """A model of numbers may answer strings, such as the names of items."""
    graph = """m (int64[b, 2] keys) => (string[b, 2] name, float[b, 2, 4] y) {
        name = Gather(names, keys)  y = Gather(w, keys) }"""
    names = np.array([f"item {i}" for i in range(1000)], object)
    check(tmp_path, model_of(graph, {"w": table(), "names": names}), {"keys": KEYS}, {"keys": KEYS[:1]})


def test_halves_on_the_way_to_floats(tmp_path: Path) -> None:
    """ONNX Runtime rounds to half precision more or less often in the imported network; that is no difference."""
    graph = """m (int64[b, 4] keys) => (float[b, 4, 4] y) {
        v = Gather(w, keys)  h = Einsum<equation = "bfd,bgd->bfg">(v, v)  y = Cast<to = 1>(h) }"""
    model = model_of(graph, {"w": table(dim=16, dtype=np.float16)})
    keys = np.array([[0, 1, 2, 3], [-1, 999, 5, 5]])
    report = import_model(tmp_path, model)
    assert [table.name for table in report.tables] == ["w"]
    assert_same(report, tmp_path / "model.onnx", {"keys": keys}, tolerance=4e-3)


def test_each_column_of_the_predictions_has_a_label_of_its_own(tmp_path: Path) -> None:
    """PyTorch and Keras call outputs `softmax` and `softmax_1`: the columns of one are not called like the other."""
    graph = """m (int64[b] keys) => (float[b, 4] softmax, float[b] softmax_1) {
        softmax = Gather(w, keys)  axis = Constant<value = int64[1] {1}>()
        softmax_1 = ReduceSum<keepdims = 0>(softmax, axis) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS[:, 0]})

    assert report.spec.labels == ("softmax__0", "softmax__1", "softmax__2", "softmax__3", "softmax_1")
