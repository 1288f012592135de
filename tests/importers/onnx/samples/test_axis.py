"""The proof of independence along samples, on random graphs: what it says of a value holds when the graph is run.

A sample's part of a value is the same whether the sample is alone or in a batch; what is free of samples is the same
for all batches, and what follows from sizes for all of one size. Both ways to use the proof are held against runs: with
shapes that two runs have shown (joined requests), and with inferred ones (models that are divided).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from inference_session.importers.onnx.context.split import infer_samples
from inference_session.importers.onnx.evaluation import open_network
from inference_session.importers.onnx.samples.axis import SampleAxis
from inference_session.importers.onnx.samples.kinds import Free, Observations, PerSample
from tests.testing.onnx_evaluation import Arrays

PRIMES = (11, 13)
MAX_ELEMENTS = 20_000
CONSTANTS: dict[str, NDArray[Any]] = {
    **{f"number{i}": np.array(i) for i in (0, 1, 2)},
    **{f"axis{i}": np.array([i]) for i in (-2, -1, 0, 1, 2)},
    "far": np.array([2**62]),
    "minus_far": np.array([-(2**62)]),
    "row": np.array([0.5, -1, 2, 0.1], np.float32),
    "square": np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32),
    "variance": np.array([0.5, 1, 2, 0.1], np.float32),
    "table": np.random.default_rng(2).standard_normal((40, 4)).astype(np.float32),
    "values": np.array([0, 1], np.float32),
    **{
        f"shape{i}": np.array(shape)
        for i, shape in enumerate(
            [[-1, 4], [4, -1], [-1], [0, -1], [-1, 2, 2], [2, -1], [1, -1], [-1, 1, 4], [0, 2, 2]]
        )
    },
    "repeats": np.array([1, 2]),
    "pads": np.array([0, 1, 0, 0]),
    "pads_in_front": np.array([1, 0, 0, 0]),
    "places": np.array([0, 2]),
}

Make = Callable[[str, str, int, int], tuple[str, list[str], dict[str, Any]]]
"""Of two values, the rank of the first, and a number: operator, inputs, attributes."""


def _plain(op_type: str, *more: str, both: bool = False, **attributes: Any) -> Make:
    return lambda a, b, rank, pick: (op_type, [a, *([b] if both else []), *more], attributes)


def _along(op_type: str, **attributes: Any) -> Make:
    return lambda a, b, rank, pick: (op_type, [a], {"axis": pick % max(rank, 1), **attributes})


def _with(op_type: str, stem: str, numbers: list[int], **attributes: Any) -> Make:
    return lambda a, b, rank, pick: (op_type, [a, f"{stem}{numbers[pick % len(numbers)]}"], attributes)


def _transposed(a: str, b: str, rank: int, pick: int) -> tuple[str, list[str], dict[str, Any]]:
    orders = list(permutations(range(rank)))
    return "Transpose", [a], {"perm": orders[pick % len(orders)]} if rank else {}


def _einsum(a: str, b: str, rank: int, pick: int) -> tuple[str, list[str], dict[str, Any]]:
    equations = ["ij,ij->i", "ij,kj->ik", "ij,ik->ijk", "ijk,ij->ik", "ij,ij->j", "ijk,ikl->ijl", "ij,ji->i"]
    return "Einsum", [a, b], {"equation": equations[pick % len(equations)]}


def _sliced(a: str, b: str, rank: int, pick: int) -> tuple[str, list[str], dict[str, Any]]:
    axis = f"axis{(0, 1, -1)[pick % 3]}"
    bounds = [["axis0", "far"], ["axis1", "far"], ["axis0", "axis2"], ["axis-1", "minus_far"]][pick % 4]
    return "Slice", [a, *bounds, axis, *(["axis-1"] if "minus_far" in bounds else [])], {}


def _gathered(a: str, b: str, rank: int, pick: int) -> tuple[str, list[str], dict[str, Any]]:
    return "Gather", [a, ("places", "number0", "axis-1", b)[pick % 4]], {"axis": pick % max(rank, 1)}


def _gemm(a: str, b: str, rank: int, pick: int) -> tuple[str, list[str], dict[str, Any]]:
    inputs = [a, b if pick % 2 else "square", *(["row"] if pick % 3 else [])]
    return "Gemm", inputs, {"transA": pick // 2 % 2, "transB": pick // 4 % 2}


SHAPES = list(range(9))
OPERATORS: list[Make] = [
    *(_plain(op_type, both=True) for op_type in ("Add", "Sub", "Mul", "Max", "MatMul", "Greater", "Expand", "Reshape")),
    *(_plain(op_type) for op_type in ("Relu", "Tanh", "Neg", "Shape", "Size", "ConstantOfShape", "NonZero", "Trilu")),
    *(_plain("Cast", to=to) for to in (TensorProto.FLOAT, TensorProto.INT64)),
    *(_plain("Mul", name) for name in ("row", "number2")),
    *(_plain("MatMul", name) for name in ("square",)),
    *(_along(op_type) for op_type in ("Softmax", "LogSoftmax", "ArgMax", "Flatten", "LpNormalization")),
    *(_with(f"Reduce{kind}", "axis", [0, 1, -1], keepdims=keep) for kind in ("Sum", "Max", "Mean") for keep in (0, 1)),
    _plain("ReduceSum", keepdims=0),
    _plain("ReduceProd", keepdims=0),
    _with("CumSum", "number", [0, 1]),
    *(_with(op_type, "axis", [0, 1, 2, -1]) for op_type in ("Unsqueeze", "Squeeze")),
    *[_with("Reshape", "shape", SHAPES)] * 3,
    lambda a, b, rank, pick: ("Concat", [a, b], {"axis": pick % max(rank, 1)}),
    lambda a, b, rank, pick: ("Where", [a, b, b if pick % 2 else "number0"], {}),
    lambda a, b, rank, pick: ("GatherElements", [a, b], {"axis": pick % max(rank, 1)}),
    lambda a, b, rank, pick: ("Range", ["number0", a, "number1"], {}),
    *[lambda a, b, rank, pick: ("Range", ["number0", "size", "number1"], {})] * 2,
    lambda a, b, rank, pick: ("Concat", [a, b], {"axis": -1}),
    lambda a, b, rank, pick: ("GatherND", [a, b], {}),
    lambda a, b, rank, pick: ("ScatterND", [a, b, a], {}),
    lambda a, b, rank, pick: ("ScatterElements", [a, b, a], {"axis": pick % max(rank, 1)}),
    lambda a, b, rank, pick: ("Gather", ["table", a], {}),
    lambda a, b, rank, pick: ("OneHot", [a, "number2", "values"], {"axis": (-1, 0)[pick % 2]}),
    lambda a, b, rank, pick: ("BatchNormalization", [a, "row", "row", "row", "variance"], {}),
    lambda a, b, rank, pick: ("LayerNormalization", [a, "row"], {"axis": -1}),
    _plain("Tile", "repeats"),
    _plain("Pad", "pads"),
    _plain("Pad", "pads_in_front"),
    _transposed,
    _transposed,
    _einsum,
    _sliced,
    _gathered,
    _gathered,
    _gemm,
]
STEPS = st.lists(st.tuples(*(st.integers(0, most) for most in (len(OPERATORS) - 1, 5, 5, 11))), min_size=2, max_size=9)


def _feeds(num_samples: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "x": (4 * random.standard_normal((num_samples, 4))).astype(np.float32),
        "ids": random.integers(0, 40, (num_samples, 3)),
    }


def _graph(steps: list[tuple[int, int, int, int]]) -> ModelProto:
    """A model of those steps that can be computed; each takes from what was made last."""
    made: Arrays = {**CONSTANTS, **_feeds(3, 0), "size": np.array(3)}
    nodes = [helper.make_node("Shape", ["x"], ["sizes"], end=1), helper.make_node("Squeeze", ["sizes"], ["size"])]
    pool = ["ids", "x"]
    for number, (operator, first, second, pick) in enumerate(steps):
        a, b = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
        op_type, inputs, attributes = OPERATORS[operator](a, b, made[a].ndim, pick)
        node = helper.make_node(op_type, inputs, [f"v{number}"], **attributes)
        value = _computed(node, made)
        if value is not None and 0 < value.size < MAX_ELEMENTS:
            made[f"v{number}"] = value
            pool.append(f"v{number}")
            nodes.append(node)
    assume(len(nodes) > 3)
    return _model(nodes)


def _computed(node: NodeProto, made: Arrays) -> NDArray[Any] | None:
    if _is_vast(node, made):
        return None
    graph = GraphProto(name="step", node=[node])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    try:
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(model).run(None, {name: made[name] for name in node.input})
    except Exception:  # noqa: BLE001  whatever NumPy raises: the operator does not take these
        return None
    return np.asarray(value)


def _is_vast(node: NodeProto, made: Arrays) -> bool:
    """Whether the numbers that this operator is given ask for more elements than a value may have: to compute it first
    would take seconds, and gigabytes.
    """
    if node.op_type not in ("Expand", "ConstantOfShape", "Range"):
        return False
    sizes = made[node.input[0 if node.op_type == "ConstantOfShape" else 1]].astype(float)
    return bool(np.prod(sizes) >= MAX_ELEMENTS)


def _model(nodes: list[NodeProto]) -> ModelProto:
    graph = GraphProto(name="random", node=nodes)
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]))
    graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 3]))
    read = {name for node in nodes for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(CONSTANTS[name], name) for name in sorted(read & set(CONSTANTS)))
    graph.output.extend(onnx.ValueInfoProto(name=node.output[0]) for node in nodes)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


class Runs:
    """Runs a graph on batches, and gives all its values."""

    def __init__(self, model: ModelProto) -> None:
        try:
            self._network = open_network(model.SerializeToString())
        except Exception:  # noqa: BLE001  ONNX Runtime knows before that it cannot be run
            assume(False)
        self._names = [value.name for value in model.graph.output]
        self._inputs = [value.name for value in self._network.get_inputs()]

    def __call__(self, feeds: Arrays) -> Arrays:
        try:
            found = self._network.run(self._names, {name: feeds[name] for name in self._inputs})
        except Exception:  # noqa: BLE001  a size of the graph does not suit this number of samples
            assume(False)
        return {**CONSTANTS, **feeds, **dict(zip(self._names, found, strict=True))}


def _claims_of_runs(model: ModelProto, runs: Runs) -> Mapping[str, Any]:
    """Of each value: (axis, outer, inner), "free", "sizes", or None."""
    values = tuple(runs(_feeds(size, size)) for size in PRIMES)
    observed = Observations.of_runs(PRIMES, values, {})
    return _claims(SampleAxis(model.graph, observed, {"x": PerSample(1), "ids": PerSample(1)}))


def _claims_of_inference(model: ModelProto, _runs: Runs) -> Mapping[str, Any]:
    """The same, of the values that nodes make."""
    claims = _claims(infer_samples(model, {}))
    return {node.output[0]: claims[node.output[0]] for node in model.graph.node if node.output[0] in claims}


def _claims(samples: SampleAxis) -> Mapping[str, Any]:
    claims: dict[str, Any] = {}
    for name in samples.kinds:
        kind = samples.kind(name)
        if isinstance(kind, Free):
            claims[name] = "free" if kind.is_constant else "sizes"
        elif (at := samples.axis(name)) is not None:
            claims[name] = (at.axis, at.outer, at.inner)
    return claims


def _part(array: NDArray[Any], claim: tuple[int, int, int], sample: int, num_samples: int) -> NDArray[Any]:
    """The part of an array that belongs to one sample."""
    axis, outer, inner = claim
    shape = array.shape
    assert shape[axis] == outer * num_samples * inner
    apart = array.reshape(*shape[:axis], outer, num_samples, inner, *shape[axis + 1 :])
    return apart.take(sample, axis + 1)


@pytest.mark.parametrize("claims_of", [_claims_of_runs, _claims_of_inference])
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_a_sample_alone_is_computed_as_in_a_batch(claims_of: Callable[..., Mapping[str, Any]], steps: Any) -> None:
    """All that the proof says of a value of a random graph is true."""
    model = _graph(steps)
    runs = Runs(model)
    claims = claims_of(model, runs)
    num_samples = 17
    feeds, others = _feeds(num_samples, 5), _feeds(num_samples, 6)
    whole, again = runs(feeds), runs(others)
    alone = {i: runs({name: array[i : i + 1] for name, array in feeds.items()}) for i in (0, 3, 16)}
    for name, claim in claims.items():
        if claim in ("free", "sizes"):
            np.testing.assert_array_equal(whole[name], again[name], err_msg=name)
            if claim == "free":
                np.testing.assert_array_equal(whole[name], alone[0][name], err_msg=name)
            continue
        for i, single in alone.items():
            expected, found = _part(single[name], claim, 0, 1), _part(whole[name], claim, i, num_samples)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4, err_msg=name)
