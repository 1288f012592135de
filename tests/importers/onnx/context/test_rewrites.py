"""Each rewrite: the ranking network answers as the original does on tiled inputs, and tiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.model_spec import CANDIDATES
from tests.testing.onnx_evaluation import run_network
from tests.testing.onnx_models import model_of, table
from tests.testing.ranking import DIM, TOLERANCE, check_ranking, matrix, network, operators, requests, tiled

LENGTH, WIDTH = 5, 3


def check(
    tmp_path: Path, text: str, constants: dict[str, Any], shapes: dict[str, tuple[int, ...]], **options: Any
) -> Any:
    """Import the model of a text with its inputs `u…` as context, and try all requests."""
    model = model_of(text, {"items": table(dim=DIM), **constants}, **options)
    context = [name for name in shapes if name.startswith("u")]
    return check_ranking(tmp_path, model, context, *requests(**shapes))


def assert_nothing_tiled(report: Any) -> None:
    """No value of the context is repeated for its candidates."""
    assert report.spec.ranking.tiled == ()


def test_layers_of_the_context_alone_run_once_per_context(tmp_path: Path) -> None:
    """Values and look-ups that depend on the context alone have one row per context."""
    report = check(
        tmp_path,
        """g (int64[n, 5] u, int64[n] v) => (float[n, 4] y) {
            h = Gather(items, u)
            p = ReduceMean<axes = [1], keepdims = 0>(h)
            a = MatMul(p, w)
            b = Tanh(a)
            t = Gather(items, v)
            y = Add(b, t)
        }""",
        {"w": matrix(DIM, DIM)},
        {"u": (LENGTH,), "v": ()},
        opset=17,
    )
    assert_nothing_tiled(report)
    pooled = next(lookup for lookup in report.spec.ranking.lookups if lookup.keys == "u")
    assert pooled.pooling == "mean"
    assert report.spec.ranking.lookups_fraction == pytest.approx(5 / 6, abs=1e-3)
    assert report.spec.ranking.multiply_adds_fraction == 1


@pytest.mark.parametrize("layer", ["Gemm(x, w, b)", "Gemm<transB = 1>(x, w_t, b)", "MatMul(x, w)"])
def test_layers_behind_a_concat_are_cut_by_columns(tmp_path: Path, layer: str) -> None:
    """Of Concat(context, candidate) W, the context's columns are multiplied once."""
    report = check(
        tmp_path,
        f"""g (float[n, 3] u_f, int64[n] v, float[n, 2] v_f, int64[n] u) => (float[n, 6] y) {{
            t = Gather(items, v)
            c = Gather(items, u)
            x = Concat<axis = -1>(u_f, t, c, v_f)
            y = {layer}
        }}""",
        {"w": matrix(13, 6), "w_t": matrix(6, 13), "b": matrix(6)},
        {"u_f": (3,), "v": (), "v_f": (2,), "u": ()},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction == pytest.approx(7 / 13, abs=1e-3)


@pytest.mark.parametrize("op_type", ["Relu", "Sigmoid", "Tanh"])
def test_elementwise_layers_stand_before_the_cut(tmp_path: Path, op_type: str) -> None:
    """An activation between a Concat and a layer runs once per context."""
    report = check(
        tmp_path,
        f"""g (int64[n] u, int64[n] v) => (float[n, 6] y) {{
            c = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(c, t)
            s = Mul(x, scale)
            a = {op_type}(s)
            y = MatMul(a, w)
        }}""",
        {"w": matrix(8, 6), "scale": matrix(8)},
        {"u": (), "v": ()},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction == pytest.approx(0.5)


def test_batch_normalization_stands_before_the_cut(tmp_path: Path) -> None:
    """Inference of BatchNormalization treats columns one by one, with their own statistics."""
    constants = {"scale": matrix(8), "shift": matrix(8), "mean": matrix(8), "var": np.abs(matrix(8)) + 0.5}
    report = check(
        tmp_path,
        """g (int64[n] u, int64[n] v) => (float[n, 6] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(t, c)
            a = BatchNormalization(x, scale, shift, mean, var)
            y = MatMul(a, w)
        }""",
        {"w": matrix(8, 6), **constants},
        {"u": (), "v": ()},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction == pytest.approx(0.5)


def test_keys_that_stand_side_by_side_are_looked_up_apart(tmp_path: Path) -> None:
    """Keys of context and candidate in one matrix, offset by feature, are looked up and flattened one by one."""
    report = check(
        tmp_path,
        """g (int64[n, 3] u, int64[n, 2] v) => (float[n, 6] y) {
            k = Concat<axis = 1>(u, v)
            o = Add(k, offsets)
            e = Gather(many, o)
            x = Flatten(e)
            y = MatMul(x, w)
        }""",
        {"many": table(rows=6000, dim=DIM), "offsets": np.arange(5) * 1000, "w": matrix(20, 6)},
        {"u": (3,), "v": (2,)},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.lookups_fraction == pytest.approx(3 / 5)
    assert report.spec.ranking.multiply_adds_fraction == pytest.approx(3 / 5)


def test_given_and_computed_keys_of_the_context_share_a_matrix(tmp_path: Path) -> None:
    """A session opens the version, whose keys are an input and the output of a network."""
    report = check(
        tmp_path,
        """g (int64[n] u, int64[n] u2, int64[n] v) => (float[n, 4] y) {
            a = Gather(items, u)
            k = Mod(u2, hundred)
            b = Gather(items, k)
            c = Concat<axis = 1>(a, b)
            p = MatMul(c, w)
            t = Gather(items, v)
            y = Mul(p, t)
        }""",
        {"hundred": np.array(100), "w": matrix(2 * DIM, DIM)},
        {"u": (), "u2": (), "v": ()},
    )
    assert len({lookup.dense_input for lookup in report.spec.ranking.lookups}) == 2
    with InferenceSession.open(report.version_dir) as session:
        for inputs, counts in requests(u=(), u2=(), v=()):
            expected = run_network(tmp_path / "model.onnx", tiled(report.spec.context, inputs, counts))["y"]
            found = session.run({**inputs, CANDIDATES: np.array(counts, np.int32)}, ["y"])["y"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


DIN = """g (int64[n, 5] u, int64[n] v) => (float[n, 4] y) {
    h = Gather(items, u)
    t = Gather(items, v)
    row = Unsqueeze(t, one)
    shape = Shape(h)
    all = Expand(row, shape)
    difference = Sub(h, all)
    product = Mul(h, all)
    x = Concat<axis = -1>(h, all, difference, product)
    a = MatMul(x, w)
    b = Add(a, bias)
    c = Sigmoid(b)
    s = MatMul(c, w2)
    weighted = Mul(h, s)
    y = ReduceSum<keepdims = 0>(weighted, one)
}"""


def din_constants(scale: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
    """Constants of DIN; the table's values lie around `shift`."""
    return {
        "items": table(dim=DIM) * np.float32(scale) + np.float32(shift),
        "one": np.array([1]),
        "w": matrix(4 * DIM, 6) / 4,
        "bias": matrix(6),
        "w2": matrix(6, 1),
    }


def test_sums_and_products_of_context_and_candidate_are_taken_apart(tmp_path: Path) -> None:
    """(h - t) W and (h * t) W of a history and a candidate: h, t and their difference are not tiled."""
    report = check(tmp_path, DIN, din_constants(0.1), {"u": (LENGTH,), "v": ()})
    assert_nothing_tiled(report)
    assert "Sub" not in operators(report)
    assert report.spec.ranking.multiply_adds_fraction > 0.5


def test_sums_whose_parts_are_large_stay_whole(tmp_path: Path) -> None:
    """Vectors near 4,096: h W - t W would have rounding errors of large numbers, which the difference does not have."""
    report = check(tmp_path, DIN, din_constants(1.0, 4096.0), {"u": (LENGTH,), "v": ()})
    assert "Sub" in operators(report)


def test_sums_of_numbers_that_may_be_anything_stay_whole(tmp_path: Path) -> None:
    """Inputs have no largest value."""
    report = check(
        tmp_path,
        """g (float[n, 4] u_f, float[n, 4] v_f) => (float[n, 6] y) {
            d = Sub(u_f, v_f)
            x = Concat<axis = 1>(u_f, v_f, d)
            y = MatMul(x, w)
        }""",
        {"w": matrix(12, 6)},
        {"u_f": (4,), "v_f": (4,)},
    )
    assert "Sub" in operators(report)
    assert report.spec.ranking.multiply_adds_fraction == pytest.approx(1 / 3, abs=1e-3)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("candidate_first", [False, True])
def test_attention_to_the_context_tiles_no_history(tmp_path: Path, *, heads: bool, candidate_first: bool) -> None:
    """Scores of candidates and sums of values, from either side of MatMul, with and without heads."""
    split = "Transpose<perm = [0, 2, 1, 3]>" if heads else "Identity"
    shape_h, shape_t = ([0, 5, 2, 2], [0, 1, 2, 2]) if heads else ([0, 5, 4], [0, 1, 4])
    turned = "[0, 1, 3, 2]" if heads else "[0, 2, 1]"
    scores = "MatMul(q, k_t)" if candidate_first else f"Transpose<perm = {turned}>(s_t)"
    report = check(
        tmp_path,
        f"""g (int64[n, 5] u, int64[n] v) => (float[n, 4] y) {{
            h = Gather(items, u)
            t = Gather(items, v)
            h_w = MatMul(h, w)
            h_r = Reshape(h_w, shape_h)
            k = {split}(h_r)
            t_w = MatMul(t, w)
            t_r = Reshape(t_w, shape_t)
            q = {split}(t_r)
            k_t = Transpose<perm = {turned}>(k)
            q_t = Transpose<perm = {turned}>(q)
            s_t = MatMul(k, q_t)
            s = {scores}
            a = Softmax<axis = -1>(s)
            o = MatMul(a, k)
            y = Reshape(o, flat)
        }}""",
        {
            "w": matrix(DIM, DIM),
            "shape_h": np.array(shape_h),
            "shape_t": np.array(shape_t),
            "flat": np.array([0, 4]),
        },
        {"u": (LENGTH,), "v": ()},
    )
    assert_nothing_tiled(report)


def test_attention_to_histories_of_any_length(tmp_path: Path) -> None:
    """The length of a history is known when a request comes; a mask hides the padding."""
    report = check(
        tmp_path,
        """g (int64[n, length] u, int64[n] v) => (float[n, 4] y) {
            h = Gather(items, u)
            t = Gather(items, v)
            row = Unsqueeze(t, one)
            product = Mul(h, row)
            s = ReduceSum<keepdims = 0>(product, last)
            hidden = Less(u, limit)
            m = Where(hidden, minus, s)
            a = Softmax<axis = -1>(m)
            a_row = Unsqueeze(a, one)
            o = MatMul(a_row, h)
            y = Squeeze(o, one)
        }""",
        {
            "items": table(dim=DIM) * np.float32(0.3),
            "one": np.array([1]),
            "last": np.array([-1]),
            "limit": np.array(200),
            "minus": np.array(-9, np.float32),
        },
        {"u": (7,), "v": ()},
    )
    assert_nothing_tiled(report)
    assert "ReduceSum" not in operators(report)


@pytest.mark.parametrize("equation", ["bld,bd->bl", "bd,bld->bl", "bd, bld -> lb"])
def test_einsum_over_the_context(tmp_path: Path, equation: str) -> None:
    """Einsum gets a letter for the candidates of a context; one that moves the samples is left alone."""
    operands = "h, t" if equation.startswith("bld") else "t, h"
    result = "Transpose<perm = [1, 0]>(e)" if equation.endswith("lb") else "Identity(e)"
    report = check(
        tmp_path,
        f"""g (int64[n, 5] u, int64[n] v) => (float[n, 5] y) {{
            h = Gather(items, u)
            t = Gather(items, v)
            e = Einsum<equation = "{equation}">({operands})
            y = {result}
        }}""",
        {},
        {"u": (LENGTH,), "v": ()},
    )
    if not equation.endswith("lb"):
        assert_nothing_tiled(report)


def test_pairs_of_the_contexts_vectors_are_its_own(tmp_path: Path) -> None:
    """DLRM: of the products of all pairs, those of two of the context's vectors are computed once."""
    places = np.array([i * 5 + j for i in range(5) for j in range(i)])
    report = check(
        tmp_path,
        """g (int64[n, 2] u, int64[n, 2] v, int64[n, 1] u2) => (float[n, 6] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            d = Gather(items, u2)
            x = Concat<axis = 1>(c, t, d)
            x_t = Transpose<perm = [0, 2, 1]>(x)
            z = MatMul(x, x_t)
            flat = Reshape(z, shape)
            pairs = Gather<axis = 1>(flat, places)
            u_first = Flatten(d)
            both = Concat<axis = 1>(u_first, pairs)
            y = MatMul(both, w)
        }""",
        {"shape": np.array([-1, 25]), "places": places, "w": matrix(14, 6)},
        {"u": (2,), "v": (2,), "u2": (1,)},
    )
    assert_nothing_tiled(report)


def test_elementwise_operators_stretch_the_context_over_its_candidates(tmp_path: Path) -> None:
    """Operands of one value, with a mask and with a broadcast dimension."""
    report = check(
        tmp_path,
        """g (float[n, 5] u_f, float[n, 5] v_f, float[n, 1] u2_f) => (float[n, 5] y, bool[n, 5] larger) {
            larger = Greater(v_f, u_f)
            a = Where(larger, u2_f, v_f)
            b = Max(a, u_f, u2_f)
            y = Div(b, two)
        }""",
        {"two": np.array(2, np.float32)},
        {"u_f": (5,), "v_f": (5,), "u2_f": (1,)},
    )
    assert_nothing_tiled(report)


def test_outputs_of_the_context_have_a_row_for_each_candidate(tmp_path: Path) -> None:
    """An output that is the context's own is repeated; it is the answer."""
    report = check(
        tmp_path,
        """g (int64[n] u, int64[n] v) => (float[n, 4] vector, float[n, 4] y) {
            vector = Gather(items, u)
            t = Gather(items, v)
            y = Sub(t, vector)
        }""",
        {},
        {"u": (), "v": ()},
    )
    assert report.spec.ranking.may_pad


def test_what_cannot_be_cut_is_tiled_and_named(tmp_path: Path) -> None:
    """A recurrent network over history and candidate needs both, and cannot be divided."""
    report = check(
        tmp_path,
        """g (int64[n, 5] u, int64[n, 1] v) => (float[n, 3] y) {
            h = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(h, t)
            steps = Transpose<perm = [1, 0, 2]>(x)
            all, last_h = GRU<hidden_size = 3>(steps, w, r)
            y = Squeeze(last_h, zero)
        }""",
        {"w": matrix(1, 9, DIM), "r": matrix(1, 9, 3), "zero": np.array([0])},
        {"u": (LENGTH,), "v": (1,)},
    )
    (line,) = report.spec.ranking.tiled
    assert "Concat 'x'" in line
    assert "for every candidate" in line
    assert line in str(report)
    assert report.spec.ranking.may_pad


def test_recurrent_networks_of_the_context_run_once(tmp_path: Path) -> None:
    """A GRU over the history, its steps in front: samples lie in the second axis."""
    report = check(
        tmp_path,
        """g (int64[n, 5] u, int64[n] v) => (float[n, 4] y) {
            h = Gather(items, u)
            steps = Transpose<perm = [1, 0, 2]>(h)
            all, last = GRU<hidden_size = 4>(steps, w, r)
            c = Squeeze(last, zero)
            t = Gather(items, v)
            y = Mul(c, t)
        }""",
        {"w": matrix(1, 12, DIM), "r": matrix(1, 12, 4), "zero": np.array([0])},
        {"u": (LENGTH,), "v": ()},
    )
    assert_nothing_tiled(report)


def test_shapes_of_the_other_side_are_known_without_it(tmp_path: Path) -> None:
    """Exporters take the number of samples from any input: context and candidate each get their own."""
    report = check(
        tmp_path,
        """g (int64[n, length] u, int64[n] v) => (float[n, 4] y) {
            v_shape = Shape(v)
            u_shape = Shape(u)
            number = Gather(u_shape, zero)
            h = Gather(items, u)
            h_target = Concat<axis = 0>(v_shape, minus_one, four)
            h2 = Reshape(h, h_target)
            p = ReduceSum<keepdims = 0>(h2, one)
            t = Gather(items, v)
            t_target = Concat<axis = 0>(number, four)
            t2 = Reshape(t, t_target)
            zeros = ConstantOfShape(t_target)
            t3 = Add(t2, zeros)
            y = Mul(p, t3)
        }""",
        {"zero": np.array([0]), "minus_one": np.array([-1]), "four": np.array([4]), "one": np.array([1])},
        {"u": (3,), "v": ()},
    )
    assert_nothing_tiled(report)


def test_cross_layers_of_low_rank(tmp_path: Path) -> None:
    """DCN-v2: u * (r U + b) V is cut by the few columns of r, so that no cross layer has a column of the context."""
    width = 5 * DIM
    report = check(
        tmp_path,
        """g (int64[n, 3] u, int64[n, 2] v) => (float[n, 1] y) {
            c = Gather(items, u)
            c_row = Flatten(c)
            t = Gather(items, v)
            t_row = Flatten(t)
            x0 = Concat<axis = 1>(c_row, t_row)
            r0 = MatMul(x0, v0)
            z0 = Gemm(r0, u0, b0)
            m0 = Mul(x0, z0)
            x1 = Add(m0, x0)
            r1 = MatMul(x1, v1)
            z1 = MatMul(r1, u1)
            m1 = Mul(z1, x0)
            x2 = Add(m1, x1)
            y = Gemm<beta = 0.0>(x2, w, b1)
        }""",
        {
            "items": table(dim=DIM) * np.float32(0.1),
            "v0": matrix(width, 2, seed=1) / 4,
            "u0": matrix(2, width, seed=2),
            "b0": matrix(width, seed=3),
            "v1": matrix(width, 2, seed=4) / 4,
            "u1": matrix(2, width, seed=5),
            "w": matrix(width, 1, seed=6) / 4,
            "b1": matrix(1, seed=7),
        },
        {"u": (3,), "v": (2,)},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction > 0.3


def test_pairs_as_jax_writes_them(tmp_path: Path) -> None:
    """The shape of all pairs is asked for, and the places that are picked are a cast of a constant."""
    places = np.array([i * 4 + j for i in range(4) for j in range(i)], np.int32)
    report = check(
        tmp_path,
        """g (int64[n, 2] u, int64[n, 2] v) => (float[n, 6] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(c, t)
            x_t = Transpose<perm = [0, 2, 1]>(x)
            z = MatMul(x, x_t)
            z_shape = Shape(z)
            number = Gather<axis = 0>(z_shape, zero)
            rest = Mul(four, four)
            shape = Concat<axis = 0>(number, rest)
            flat = Reshape(z, shape)
            wide = Cast<to = 7>(places)
            pairs = Gather<axis = 1>(flat, wide)
            y = MatMul(pairs, w)
        }""",
        {"zero": np.array([0]), "four": np.array([4]), "places": places, "w": matrix(6, 6)},
        {"u": (2,), "v": (2,)},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction > 0


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_sums_of_fields_are_added_by_parts(tmp_path: Path, op_type: str, keepdims: int) -> None:
    """A sum or mean over the context's and the candidate's fields, as in a factorisation machine."""
    report = check(
        tmp_path,
        f"""g (int64[n, 5] u, int64[n, 2] v, int64[n, 3] u2) => (float[n, k, m] y) {{
            c = Gather(items, u)
            t = Gather(items, v)
            d = Gather(items, u2)
            x = Concat<axis = 1>(c, t, d)
            s = {op_type}<keepdims = {keepdims}>(x, one)
            q = Mul(s, s)
            y = Reshape(q, shape)
        }}""",
        {"items": table(dim=DIM) * np.float32(0.1), "one": np.array([1]), "shape": np.array([-1, 1, DIM])},
        {"u": (5,), "v": (2,), "u2": (3,)},
    )
    assert_nothing_tiled(report)


def test_sums_over_other_axes_stay(tmp_path: Path) -> None:
    """The sum of each field's vector is no sum of fields."""
    check(
        tmp_path,
        """g (int64[n, 5] u, int64[n, 2] v) => (float[n, 7] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(c, t)
            y = ReduceSum<keepdims = 0>(x, last)
        }""",
        {"last": np.array([-1])},
        {"u": (5,), "v": (2,)},
    )


HISTORY_LAYERS = """g (int64[n, 5] u, int64[n] v) => (float[n, 5, 1] y) {
    h = Gather(items, u)
    t0 = Gather(items, v)
    t = Unsqueeze(t0, one)
    p = Mul(h, t)
    a0 = MatMul(p, w0)
    b0 = Add(a0, c0)
    f0 = ACTIVATION(b0)
    a1 = MatMul(f0, w1)
    b1 = Add(c1, a1)
    f1 = ACTIVATION(b1)
    a2 = MatMul(f1, w2)
    y = Add(a2, c2)
}"""


@pytest.mark.parametrize("activation", ["Relu", "Sigmoid", "Tanh", "LeakyRelu", "Gelu", "Softplus", "Neg"])
def test_columns_of_ones_carry_biases(tmp_path: Path, activation: str) -> None:
    """Layers behind an attention over a history add no bias in a separate pass."""
    report = check(
        tmp_path,
        HISTORY_LAYERS.replace("ACTIVATION", activation),
        {
            "one": np.array([1]),
            "w0": matrix(DIM, 6),
            "c0": matrix(6, seed=1),
            "w1": matrix(6, 3, seed=2),
            "c1": matrix(3, seed=3),
            "w2": matrix(3, 1, seed=4),
            "c2": matrix(1, seed=5),
        },
        {"u": (5,), "v": ()},
        opset=20,
    )
    assert "Add" not in operators(report)[operators(report).index(activation) :]
    assert_nothing_tiled(report)


def test_an_activation_of_which_nothing_is_left_carries_no_bias(tmp_path: Path) -> None:
    """Log makes zero of one; a value that is read twice keeps its width."""
    weights = {f"w{i}": np.abs(matrix(*shape, seed=i)) + 0.5 for i, shape in enumerate([(DIM, 6), (6, 3), (3, 1)])}
    biases = {f"c{i}": np.full(width, 30, np.float32) for i, width in enumerate((6, 3, 1))}
    report = check(
        tmp_path,
        HISTORY_LAYERS.replace("ACTIVATION", "Log"),
        {"items": np.abs(table(dim=DIM)) * np.float32(0.1), "one": np.array([1]), **weights, **biases},
        {"u": (5,), "v": ()},
    )
    assert operators(report).count("Add") >= 2


@pytest.mark.parametrize("slope", [np.array([0.3]), np.array([[-0.2]]), np.array([0.1, 0.2, 0.3, 1.7])])
def test_one_slope_for_all_is_no_tensor(tmp_path: Path, slope: NDArray[np.float64]) -> None:
    """PRelu with one slope becomes LeakyRelu; with a slope for each column it stays."""
    report = check(
        tmp_path,
        """g (int64[n] u, int64[n] v) => (float[n, 4] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            x = Sub(c, t)
            y = PRelu(x, slope)
        }""",
        {"slope": slope.astype(np.float32)},
        {"u": (), "v": ()},
    )
    assert ("PRelu" in operators(report)) == (slope.size > 1)


@pytest.mark.parametrize("indices", [[[1, 0], [2, 1], [3, 0]], [[3, 3], [0, 2], [2, 2]]])
def test_pairs_picked_by_gather_nd(tmp_path: Path, indices: list[list[int]]) -> None:
    """As PyTorch's exporter writes pairs[:, rows, columns]: each sample's own pairs, so that requests are joined."""
    report = check(
        tmp_path,
        """g (int64[n, 2] u, int64[n, 2] v) => (float[n, 6] y) {
            c = Gather(items, u)
            t = Gather(items, v)
            x = Concat<axis = 1>(c, t)
            x_t = Transpose<perm = [0, 2, 1]>(x)
            z = MatMul(x, x_t)
            turned = Transpose<perm = [1, 2, 0]>(z)
            picked = GatherND(turned, indices)
            pairs = Transpose<perm = [1, 0]>(picked)
            y = MatMul(pairs, w)
        }""",
        {"indices": np.array(indices), "w": matrix(3, 6)},
        {"u": (2,), "v": (2,)},
    )
    assert_nothing_tiled(report)
    assert report.spec.ranking.multiply_adds_fraction > 0
    assert report.spec.joinable


def _experts(gates: str) -> str:
    """Two experts of each sample as a matrix, and rows that are multiplied by it."""
    return f"""g (float[n, 4] u_f, float[n, 4] v_f) => (float[n, 4] first, float[n, 4] second) {{
        both = Add(u_f, v_f)
        one_row = Unsqueeze(both, one)
        square = Mul(both, both)
        other_row = Unsqueeze(square, one)
        experts = Concat<axis = 1>(one_row, other_row)
        gate0 = MatMul(both, w0)
        row0 = Unsqueeze(gate0, one)
        mixed0 = MatMul(row0, experts)
        first = Squeeze(mixed0, one)
        {gates}
        row1 = Unsqueeze(gate1, one)
        mixed1 = MatMul(row1, experts)
        second = Squeeze(mixed1, one)
    }}"""


@pytest.mark.parametrize(
    ("gates", "num_products"), [("gate1 = MatMul(square, w1)", 1), ("gate1 = MatMul(first, w1)", 2)]
)
def test_rows_times_one_matrix_are_multiplied_at_once(tmp_path: Path, gates: str, num_products: int) -> None:
    """Unless one row depends on the product of another."""
    constants = {"w0": matrix(4, 2), "w1": matrix(4, 2, seed=8), "one": np.array([1])}
    report = check(tmp_path, _experts(gates), constants, {"u_f": (4,), "v_f": (4,)}, opset=17)
    products = [node for node in network(report).graph.node if node.op_type == "MatMul"]
    initializers = {tensor.name for tensor in network(report).graph.initializer}
    assert sum(node.input[1] not in initializers for node in products) == num_products
