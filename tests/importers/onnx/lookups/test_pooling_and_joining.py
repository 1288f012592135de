"""Work that moves from the graph into the look-up, and look-ups that share a matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.errors import InvalidRequestError
from inference_session.importers.report import ImportReport
from tests.testing.onnx_evaluation import Arrays
from tests.testing.onnx_models import check, import_model, model_of, table

KEYS = np.array([[0, 1, 5], [999, -1, 5], [-1000, 7, 5]], np.int64)
WEIGHTS = np.array([[0, 1, 2], [0.5, -1, 0], [3, 0, 0]], np.float32)


def _poolings(report: ImportReport) -> list[str]:
    return [lookup.pooling for lookup in report.spec.lookups]


def _reduced(op: str, opset: int, keepdims: int, axis: int = 1, before: str = "") -> str:
    as_input = opset >= 18 or (op == "ReduceSum" and opset >= 13)
    axes = f"a = Constant<value = int64[1] {{{axis}}}>()" if as_input else ""
    call = f"{op}<keepdims = {keepdims}>(v, a)" if as_input else f"{op}<keepdims = {keepdims}, axes = [{axis}]>(v)"
    shape = "b, 1, 4" if keepdims else "b, 4"
    return f"m (int64[b, 3] keys) => (float[{shape}] y) {{ v = Gather(w, keys) {before} {axes} y = {call} }}"


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax"])
def test_reductions_over_the_last_key_axis_are_pooled(tmp_path: Path, op: str, keepdims: int, opset: int) -> None:
    """Sum, mean and maximum over a bag move into the look-up, in each opset's form."""
    model = model_of(_reduced(op, opset, keepdims), {"w": table()}, opset)

    report = check(tmp_path, model, {"keys": KEYS})

    assert _poolings(report) == [op.removeprefix("Reduce").lower()]


def test_negative_axes_count_from_the_end(tmp_path: Path) -> None:
    """Axis -2 of [b, 3, 4] is the bag."""
    assert _poolings(check(tmp_path, model_of(_reduced("ReduceSum", 18, 0, -2), {"w": table()}), {"keys": KEYS})) == [
        "sum"
    ]


def test_other_axes_are_not_pooled(tmp_path: Path) -> None:
    """A sum over the vector's own elements stays in the dense network."""
    graph = _reduced("ReduceSum", 18, 0, 2).replace("b, 4] y", "b, 3] y")

    assert _poolings(check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS})) == ["none"]


def test_vectors_that_others_read_too_are_not_pooled(tmp_path: Path) -> None:
    """Pooling would remove single vectors that another node needs."""
    graph = """m (int64[b, 3] keys) => (float[b, 4] y, float[b, 3, 4] z) {
        v = Gather(w, keys)  a = Constant<value = int64[1] {1}>()  y = ReduceSum<keepdims = 0>(v, a)  z = Neg(v) }"""

    assert _poolings(check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS})) == ["none"]


def test_rows_of_one_number_are_pooled(tmp_path: Path) -> None:
    """The wide part of wide-and-deep: a table of single numbers, summed."""
    graph = """m (int64[b, 3] keys) => (float[b] y) {
        v = Gather(w, keys)  a = Constant<value = int64[1] {1}>()  y = ReduceSum<keepdims = 0>(v, a) }"""

    assert _poolings(check(tmp_path, model_of(graph, {"w": table()[:, 0]}), {"keys": KEYS})) == ["sum"]


def test_half_precision_is_summed_by_the_lookup_only_where_the_graph_sums_floats(tmp_path: Path) -> None:
    """A sum in float16 rounds differently and stays; one after a cast to float32 moves."""
    graph = """m (int64[b, 3] keys, int64[b, 3] more) => (float16[b, 4] y, float[b, 4] z) {
        a = Constant<value = int64[1] {1}>()  v = Gather(w, keys)  y = ReduceSum<keepdims = 0>(v, a)
        h = Gather(w, more)  f = Cast<to = 1>(h)  z = ReduceSum<keepdims = 0>(f, a) }"""

    report = check(tmp_path, model_of(graph, {"w": table(dtype=np.float16)}), {"keys": KEYS, "more": KEYS})

    assert sorted(_poolings(report)) == ["none", "sum"]


def _weighted(factor: str, inputs: str, reduction: str = "ReduceSum") -> str:
    return f"""m (int64[b, 3] keys, {inputs}) => (float[b, 4] y) {{
        l = Constant<value = int64[1] {{-1}}>()  {factor}  v = Gather(w, keys)  p = Mul(v, f)
        a = Constant<value = int64[1] {{1}}>()  y = {reduction}<keepdims = 0>(p, a) }}"""


def test_factors_from_the_request_become_weights(tmp_path: Path) -> None:
    """Per-sample weights that are an input are used as they are."""
    model = model_of(_weighted("f = Unsqueeze(x, l)", "float[b, 3] x"), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS, "x": WEIGHTS})

    assert report.spec.lookups[0].weights == "x"
    assert not (report.version_dir / "keys.onnx").exists()


@pytest.mark.parametrize(
    "factor", ["z = Constant<value = int64 {5}>()  e = Equal(keys, z)  n = Not(e)  c = Cast<to = 1>(n)"]
)
def test_masks_computed_from_keys_become_weights(tmp_path: Path, factor: str) -> None:
    """A padding mask is computed in addition to the keys."""
    model = model_of(_weighted(f"{factor}  f = Unsqueeze(c, l)", "float[b] x"), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS, "x": WEIGHTS[:, 0]})

    assert _poolings(report) == ["sum"]
    assert report.spec.lookups[0].weights is not None


@pytest.mark.parametrize("shape", ["b, 1, 1", "1, 3, 1", "b, 3, 1"])
def test_factors_are_stretched_to_the_keys(tmp_path: Path, shape: str) -> None:
    """Factors that broadcast over samples or bags weigh each key."""
    array = WEIGHTS[..., None]
    array = array[:, :1] if shape == "b, 1, 1" else array[:1] if shape.startswith("1") else array
    model = model_of(_weighted("f = Identity(x)", f"float[{shape}] x"), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS, "x": array})

    assert _poolings(report) == ["sum"]


def test_factors_per_element_are_not_weights(tmp_path: Path) -> None:
    """A factor for each element of a vector stays in the dense network."""
    model = model_of(_weighted("f = Identity(x)", "float[b, 3, 4] x"), {"w": table()})

    report = check(tmp_path, model, {"keys": KEYS, "x": np.ones((3, 3, 4), np.float32)})

    assert _poolings(report) == ["none"]


def test_factors_that_depend_on_vectors_are_not_weights(tmp_path: Path) -> None:
    """Attention over a history uses its vectors twice."""
    graph = """m (int64[b, 3] keys) => (float[b, 4] y) {
        v = Gather(w, keys)  l = Constant<value = int64[1] {2}>()  f = ReduceMax<keepdims = 1>(v, l)
        p = Mul(v, f)  a = Constant<value = int64[1] {1}>()  y = ReduceSum<keepdims = 0>(p, a) }"""

    assert _poolings(check(tmp_path, model_of(graph, {"w": table()}), {"keys": KEYS})) == ["none"]


def test_factors_that_depend_on_vectors_of_another_table_are_not_weights(tmp_path: Path) -> None:
    """The network applies them, and other look-ups of the model are pooled all the same."""
    graph = """m (int64[b, 3] keys, int64[b, 3] tags) => (float[b, 4] y, float[b, 4] z) {
        v = Gather(w, keys)  bias = Gather(x, keys)  p = Softmax<axis = 1>(bias)  f = Unsqueeze(p, last)
        r = Mul(v, f)  y = ReduceSum<keepdims = 0>(r, second)
        t = Gather(u, tags)  z = ReduceSum<keepdims = 0>(t, second) }"""
    constants = {"last": np.array([-1]), "second": np.array([1])}
    model = model_of(graph, {"w": table(), "x": table()[:, 0].copy(), "u": table(seed=1), **constants})

    report = check(tmp_path, model, {"keys": KEYS, "tags": KEYS}, {"keys": KEYS[:1], "tags": KEYS[:1]})

    assert {lookup.table: lookup.pooling for lookup in report.spec.lookups} == {"w": "none", "x": "none", "u": "sum"}


def test_a_weighted_mean_is_left_to_the_network(tmp_path: Path) -> None:
    """Product then mean divides by the number of keys, not by the sum of weights."""
    model = model_of(_weighted("f = Unsqueeze(x, l)", "float[b, 3] x", "ReduceMean"), {"w": table()})

    assert _poolings(check(tmp_path, model, {"keys": KEYS, "x": WEIGHTS})) == ["none"]


def test_an_empty_bag_is_noted(tmp_path: Path) -> None:
    """The mean of nothing is NaN for ONNX Runtime and zero for us: the report says so where it can happen."""
    fixed = _reduced("ReduceMean", 18, 0)
    open_size = fixed.replace("int64[b, 3]", "int64[b, l]")

    notes = [import_model(tmp_path, model_of(graph, {"w": table()})).notes for graph in (fixed, open_size)]

    assert [any("empty bag" in note for note in found) for found in notes] == [False, True]


def _inputs() -> Arrays:
    return {"a": KEYS[:, :1], "c": KEYS[:, 1], "d": KEYS, "x": WEIGHTS}


CONCAT = """m (int64[b, 1] a, int64[b] c, int64[b, 3] d, float[b, 3] x) => (float[b, n] y) {
    u = Gather(w, a)  one = Constant<value = int64[1] {1}>()  s = Squeeze(u, one)
    v = Gather(w2, c)  p = Gather(w, d)  q = ReduceSum<keepdims = 0>(p, one)
    r = Gather(w2, d)  f = Flatten<axis = 1>(r)  y = Concat<axis = 1>(ORDER) }"""


@pytest.mark.parametrize(
    ("order", "matrices"),
    [("s, v, q, f, x", 1), ("x, s, v, f, q", 1), ("s, v, x, q, f", 2), ("s, x, v", 0), ("s, q, v, f", 1)],
)
def test_neighbours_in_a_concat_share_a_matrix(tmp_path: Path, order: str, matrices: int) -> None:
    """Look-ups that stand side by side fill one input of the dense network, in the Concat's order."""
    model = model_of(CONCAT.replace("ORDER", order), {"w": table(), "w2": table(dim=2, seed=1)})

    report = check(tmp_path, model, _inputs())

    joined = {lookup.dense_input for lookup in report.spec.lookups if lookup.joined}
    assert len(joined) == matrices


def test_stacked_vectors_share_a_matrix(tmp_path: Path) -> None:
    """A dot-product interaction stacks [b, 1, dim] vectors on axis 1."""
    graph = """m (int64[b] a, int64[b] c, float[b, 4] x) => (float[b, 3, 4] y) {
        one = Constant<value = int64[1] {1}>()  u = Gather(w, a)  p = Unsqueeze(u, one)
        v = Gather(w, c)  q = Unsqueeze(v, one)  r = Unsqueeze(x, one)  y = Concat<axis = -2>(p, q, r) }"""
    inputs = {"a": KEYS[:, 0], "c": KEYS[:, 1], "x": np.ones((3, 4), np.float32)}

    report = check(tmp_path, model_of(graph, {"w": table()}), inputs)

    assert all(lookup.joined for lookup in report.spec.lookups)


@pytest.mark.parametrize(
    ("flattened", "is_skipped"),
    [
        ("f = Flatten(t)", True),
        ("f = Flatten<axis = -2>(t)", True),
        ("s = Constant<value = int64[2] {-1, 8}>()  f = Reshape(t, s)", True),
        ("s = Constant<value = int64[2] {0, -1}>()  f = Reshape(t, s)", True),
        ("s = Constant<value = int64[2] {-1, 4}>()  f = Reshape(t, s)", False),
        ("f = Flatten<axis = 2>(t)", False),
        ("f = Flatten(t)  other = Neg(t)", False),
    ],
)
def test_stacked_vectors_are_read_flat(tmp_path: Path, flattened: str, is_skipped: bool) -> None:
    """Nodes that flatten what a matrix holds are left out; nothing shapes it where all readers want it flat."""
    more = ", float[b, 2, 4] other" if "other" in flattened else ""
    graph = f"""m (int64[b, 1] a, int64[b, 1] c) => (float[p, q] y{more}) {{
        u = Gather(w, a)  v = Gather(w, c)  t = Concat<axis = 1>(u, v)  {flattened}  y = Neg(f) }}"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"a": KEYS[:, :1], "c": KEYS[:, 1:2]})

    assert all(lookup.joined for lookup in report.spec.lookups)
    kinds = {node.op_type for node in onnx.load(report.version_dir / "dense.onnx").graph.node}
    assert kinds.isdisjoint({"Reshape", "Flatten"}) == is_skipped


def test_vectors_with_other_readers_are_not_joined(tmp_path: Path) -> None:
    """A vector with a further reader keeps a separate input."""
    graph = """m (int64[b] a, int64[b] c) => (float[b, 8] y, float[b, 4] z) {
        u = Gather(w, a)  v = Gather(w, c)  y = Concat<axis = 1>(u, v)  z = Neg(u) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"a": KEYS[:, 0], "c": KEYS[:, 1]})

    assert not any(lookup.joined for lookup in report.spec.lookups)


def test_concat_over_samples_is_not_joined(tmp_path: Path) -> None:
    """Axis 0 puts samples below each other, not columns side by side."""
    graph = """m (int64[b] a, int64[b] c) => (float[n, 4] y) {
        u = Gather(w, a)  v = Gather(w, c)  y = Concat<axis = 0>(u, v) }"""

    report = check(tmp_path, model_of(graph, {"w": table()}), {"a": KEYS[:, 0], "c": KEYS[:, 1]})

    assert not any(lookup.joined for lookup in report.spec.lookups)


def test_neighbours_of_unequal_length_are_refused(tmp_path: Path) -> None:
    """Lengths that no Concat would join must not make the look-up write beyond the matrix."""
    graph = """m (int64[n] a, int64[k] c, float[8, 1] f) => (float[n, 1] y) {
        u = Gather(w, a)  v = Gather(w, c)  x = Concat<axis = 1>(u, v)  y = MatMul(x, f) }"""
    report = import_model(tmp_path, model_of(graph, {"w": table()}))
    assert [lookup.joined for lookup in report.spec.lookups] == [True, True]

    with InferenceSession.open(report.version_dir) as session:
        for num_left, num_right in ((4, 5000), (5000, 4), (0, 1)):
            inputs = {
                "a": np.zeros(num_left, np.int64),
                "c": np.zeros(num_right, np.int64),
                "f": np.ones((8, 1), np.float32),
            }
            with pytest.raises(InvalidRequestError, match=f"'c' have {num_right} samples, but 'a' have {num_left}:"):
                session.run(inputs)
