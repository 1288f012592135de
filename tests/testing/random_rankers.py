"""Random ranking models, and random requests to them: pieces of networks from papers, put together by chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]
NUM_ROWS = 300
_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Softplus", "Selu")


@dataclass(frozen=True)
class Input:
    """One input of a model; its first dimension counts samples."""

    name: str
    sizes: tuple[int, ...]
    """Of the other dimensions."""
    is_key: bool
    is_contexts: bool


@dataclass
class RandomRanker:
    """A model, and how to make up requests."""

    model: ModelProto
    inputs: list[Input]
    text: str
    """What it is made of."""

    @property
    def context(self) -> list[str]:
        """The inputs that are given once per context."""
        return [each.name for each in self.inputs if each.is_contexts]

    def request(self, seed: int, counts: Sequence[int], spread: float = 1.0, centre: float = 0.0) -> dict[str, Array]:
        """Inputs of contexts with these numbers of candidates."""
        random, found = np.random.default_rng(seed), {}
        for each in self.inputs:
            shape = (len(counts) if each.is_contexts else sum(counts), *each.sizes)
            numbers = centre + spread * random.standard_normal(shape)
            found[each.name] = random.integers(0, NUM_ROWS, shape) if each.is_key else numbers.astype(np.float32)
        return found


@dataclass(frozen=True)
class _Value:
    """A vector of each sample, or several below each other."""

    name: str
    width: int
    length: int = 0
    """0: one vector, [samples, width]."""


@dataclass
class _Maker:
    random: np.random.Generator
    opset: int
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.random.integers(len(items)))]

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values)
        return name

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.constant((scale * self.random.standard_normal(shape)).astype(np.float32))

    def reduced(self, op_type: str, name: str, axis: int, *, keep: bool) -> str:
        if self.opset >= 18 or (op_type == "ReduceSum" and self.opset >= 13):
            return self.add(op_type, name, self.constant([axis]), keepdims=int(keep))
        return self.add(op_type, name, axes=[axis], keepdims=int(keep))

    def layer(self, value: _Value, units: int) -> _Value:
        scale = self.pick((1.0, 1.0, 1.4, 0.3)) / np.sqrt(value.width)
        weights = self.normal(value.width, units, scale=scale)
        bias = self.normal(units, scale=self.pick((0.1, 1.0)))
        if value.length or self.random.random() < 0.4:
            product = self.add("MatMul", value.name, weights)
            name = self.add("Add", product, bias) if self.random.random() < 0.8 else product
        else:
            name = self.add("Gemm", value.name, weights, bias)
        return _Value(name, units, value.length)

    def activated(self, value: _Value) -> _Value:
        kind = self.pick((*_ACTIVATIONS, "Gelu", "PRelu", "Dice", "Normalized"))
        if kind == "PRelu":
            slopes = 1 if self.random.random() < 0.5 else value.width
            name = self.add("PRelu", value.name, self.constant(self.random.random(slopes).astype(np.float32)))
        elif kind == "Dice":
            gate = self.add("Sigmoid", self.scaled(value))
            name = self.add("Mul", value.name, gate)
        elif kind == "Normalized":
            name = self.normalized(value)
        elif kind == "Gelu" and self.opset < 20:
            name = self.add("Relu", value.name)
        else:
            name = self.add(kind, value.name)
        return _Value(name, value.width, value.length)

    def scaled(self, value: _Value) -> str:
        """Inference of BatchNormalization."""
        if value.length:
            return self.add("Mul", value.name, self.normal(value.width))
        rows = [self.normal(value.width) for _ in range(3)]
        return self.add("BatchNormalization", value.name, *rows, self.constant(self._variances(value.width)))

    def _variances(self, width: int) -> Array:
        return (0.05 + self.random.random(width)).astype(np.float32)

    def normalized(self, value: _Value) -> str:
        if self.opset < 17 or self.random.random() < 0.3:
            return self.normalized_by_hand(value)
        return self.add("LayerNormalization", value.name, self.normal(value.width), self.normal(value.width), axis=-1)

    def normalized_by_hand(self, value: _Value) -> str:
        square = self.add("Mul", value.name, value.name)
        total = self.reduced("ReduceSum", square, -1, keep=True)
        length = self.add("Sqrt", self.add("Add", total, self.constant(np.float32(1e-6))))
        return self.add("Div", value.name, length)

    def mlp(self, value: _Value, *, last: int | None = None) -> _Value:
        for _ in range(self.pick((1, 1, 2, 3))):
            value = self.activated(self.layer(value, int(self.pick((4, 8, 16, 32, 64)))))
        return value if last is None else self.layer(value, last)

    def joined(self, values: Sequence[_Value], axis: int = -1) -> _Value:
        name = self.add("Concat", *(value.name for value in values), axis=axis)
        if axis == 1:
            return _Value(name, values[0].width, sum(value.length for value in values))
        return _Value(name, sum(value.width for value in values), values[0].length)

    def row(self, value: _Value) -> _Value:
        return _Value(self.add("Unsqueeze", value.name, self.constant([1])), value.width, 1)

    def flat(self, value: _Value) -> _Value:
        return _Value(self.add("Flatten", value.name, axis=1), value.width * value.length) if value.length else value

    def dims(self, value: _Value, width: int) -> _Value:
        return value if value.width == width else self.layer(value, width)


def random_ranker(seed: int, opset: int | None = None) -> RandomRanker:
    """A model of several inputs, some of them the context's."""
    random = np.random.default_rng(seed)
    maker = _Maker(random, opset or int(random.choice([13, 15, 17, 18, 20, 21])))
    dim = int(maker.pick((4, 8, 16)))
    scale = maker.pick((0.05, 0.1, 0.3, 1.0))
    tables = [maker.normal(NUM_ROWS, dim, scale=scale) for _ in range(2)]
    users, histories = _context(maker, tables, dim)
    items = _candidates(maker, tables, dim)
    values = [*users, *items]
    for step in maker.random.permutation(len(_STEPS))[: int(maker.pick((1, 2, 3, 4)))]:
        maker.steps.append(_STEPS[step].__name__.strip("_"))
        values += _STEPS[step](maker, users, histories, items)
    outputs = [_head(maker, values) for _ in range(int(maker.pick((1, 1, 2))))]
    return _finished(maker, outputs, f"seed {seed}, opset {maker.opset}, dim {dim}, tables {scale}")


def _context(maker: _Maker, tables: list[str], dim: int) -> tuple[list[_Value], list[_Value]]:
    users, histories = [_looked_up(maker, "u", maker.pick(tables), dim, maker.pick((0, 1, 3)))], []
    if maker.random.random() < 0.4:
        users.append(_number(maker, "u_f", int(maker.pick((1, 3, 10)))))
    if maker.random.random() < 0.6:
        history = _looked_up(maker, "clicks", maker.pick(tables), dim, int(maker.pick((3, 10, 20))), flat=False)
        histories.append(history)
        users.append(_Value(maker.reduced(maker.pick(("ReduceMean", "ReduceSum")), history.name, 1, keep=False), dim))
    return users, histories


def _candidates(maker: _Maker, tables: list[str], dim: int) -> list[_Value]:
    items = [_looked_up(maker, "v", maker.pick(tables), dim, maker.pick((0, 0, 2)))]
    if maker.random.random() < 0.4:
        items.append(_number(maker, "v_f", int(maker.pick((1, 4)))))
    return items


def _looked_up(maker: _Maker, name: str, table: str, dim: int, length: int, *, flat: bool = True) -> _Value:
    maker.inputs.append(Input(name, (length,) if length else (), is_key=True, is_contexts=name != "v"))
    vectors = _Value(maker.add("Gather", table, name), dim, length)
    return maker.flat(vectors) if flat else vectors


def _number(maker: _Maker, name: str, width: int) -> _Value:
    maker.inputs.append(Input(name, (width,), is_key=False, is_contexts=name.startswith("u")))
    return _Value(name, width)


_Made = list[_Value]


def _tower(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    one, other = maker.mlp(maker.joined(users), last=8), maker.mlp(maker.joined(items), last=8)
    return [one, other, _Value(maker.add("Mul", one.name, other.name), 8)]


def _cosine(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    one, other = maker.mlp(maker.joined(users), last=8), maker.mlp(maker.joined(items), last=8)
    names = [maker.normalized_by_hand(value) for value in (one, other)]
    return [_Value(maker.reduced("ReduceSum", maker.add("Mul", *names), -1, keep=True), 1)]


def _difference(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    item = maker.pick(items)
    user = maker.dims(maker.pick(users), item.width)
    name = maker.add(maker.pick(("Sub", "Add")), user.name, item.name)
    if maker.random.random() < 0.3:
        name = maker.add("Abs", name)
    return [_Value(name, item.width)]


def _attention_unit(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """DIN: scores of each click by an MLP over click, item, difference and product."""
    found = []
    for history in histories:
        item = maker.row(maker.dims(items[0], history.width))
        shape = maker.add("Shape", history.name)
        wide = _Value(maker.add("Expand", item.name, shape), history.width, history.length)
        parts = [history, wide]
        if maker.random.random() < 0.8:
            parts.append(_Value(maker.add("Sub", history.name, wide.name), history.width, history.length))
        if maker.random.random() < 0.8:
            parts.append(_Value(maker.add("Mul", history.name, item.name), history.width, history.length))
        scores = maker.mlp(maker.joined(parts), last=1).name
        if maker.random.random() < 0.7:
            scores = maker.add("Softmax", scores, axis=1)
        weighted = maker.add("Mul", history.name, scores)
        found.append(_Value(maker.reduced("ReduceSum", weighted, 1, keep=False), history.width))
    return found


def _dot_attention(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    found = []
    for history in histories:
        keys, values = (maker.layer(history, 8) if maker.random.random() < 0.5 else history for _ in range(2))
        item = maker.row(maker.dims(items[0], keys.width))
        turned = maker.add("Transpose", keys.name, perm=[0, 2, 1])
        scores = maker.add("MatMul", item.name, turned)
        if maker.random.random() < 0.7:
            scores = maker.add("Mul", scores, maker.constant(np.float32(1 / np.sqrt(keys.width))))
        weights = maker.add("Softmax", scores, axis=-1)
        mixed = maker.add("MatMul", weights, values.name)
        found.append(_Value(maker.add("Squeeze", mixed, maker.constant([1])), values.width))
    return found


def _cross(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """Cross layers of DCN and DCN-v2."""
    x0 = value = maker.joined([*users, *items])
    rank = int(maker.pick((0, 1, 3, x0.width)))
    for _ in range(int(maker.pick((1, 2, 3)))):
        layer = value if not rank else maker.layer(value, rank)
        layer = maker.layer(layer, 1 if not rank else x0.width)
        product = maker.add("Mul", x0.name, layer.name)
        value = _Value(maker.add("Add", product, value.name), x0.width)
    return [value]


def _factorised(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """A factorisation machine: half of the square of the sum, less the sum of squares."""
    width = items[0].width
    fields = maker.joined([maker.row(maker.dims(value, width)) for value in (*users, *items)], axis=1)
    total = maker.reduced("ReduceSum", fields.name, 1, keep=False)
    squares = maker.reduced("ReduceSum", maker.add("Mul", fields.name, fields.name), 1, keep=False)
    difference = maker.add("Sub", maker.add("Mul", total, total), squares)
    return [_Value(maker.add("Mul", difference, maker.constant(np.float32(0.5))), width)]


def _all_pairs(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """DLRM: the products of all pairs of vectors."""
    width = items[0].width
    fields = maker.joined([maker.row(maker.dims(value, width)) for value in (*users, *items)], axis=1)
    turned = maker.add("Transpose", fields.name, perm=[0, 2, 1])
    flat = maker.add("Flatten", maker.add("MatMul", fields.name, turned), axis=1)
    places = [i * fields.length + j for i in range(fields.length) for j in range(i)]
    return [_Value(maker.add("Gather", flat, maker.constant(np.array(places)), axis=1), len(places))]


def _experts(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """Experts that a gate mixes."""
    value = maker.joined([*users, *items])
    experts = maker.joined([maker.row(maker.mlp(value, last=8)) for _ in range(3)], axis=1)
    gate = maker.add("Softmax", maker.layer(value, 3).name, axis=1)
    mixed = maker.add("MatMul", maker.row(_Value(gate, 3)).name, experts.name)
    return [_Value(maker.add("Squeeze", mixed, maker.constant([1])), 8)]


def _bilinear(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    item = maker.pick(items)
    user = maker.layer(maker.pick(users), item.width)
    product = maker.add("Mul", user.name, item.name)
    return [_Value(maker.reduced("ReduceSum", product, -1, keep=True), 1)]


def _gated(maker: _Maker, users: _Made, histories: _Made, items: _Made) -> _Made:
    """Weights of fields by a sigmoid (SENet, LHUC), and a normalisation over both sides."""
    value = maker.joined([*users, *items])
    gate = maker.add("Sigmoid", maker.mlp(value, last=value.width).name)
    return [_Value(maker.normalized(_Value(maker.add("Mul", value.name, gate), value.width)), value.width)]


_Step = Callable[[_Maker, _Made, _Made, _Made], _Made]
_STEPS: tuple[_Step, ...] = (
    _tower, _cosine, _difference, _attention_unit, _dot_attention, _cross, _factorised, _all_pairs, _experts,
    _bilinear, _gated,
)  # fmt: skip


def _head(maker: _Maker, values: _Made) -> tuple[str, int]:
    """An MLP over everything, with or without a sigmoid."""
    width = int(maker.pick((1, 1, 3)))
    found = maker.mlp(maker.joined(values), last=width)
    end = maker.pick(("Sigmoid", "Sigmoid", "", "Softmax"))
    name = maker.add(end, found.name) if end == "Sigmoid" else found.name
    return (maker.add("Softmax", name, axis=-1) if end == "Softmax" and width > 1 else name), width


def _finished(maker: _Maker, outputs: list[tuple[str, int]], text: str) -> RandomRanker:
    names = dict.fromkeys(outputs)
    graph = helper.make_graph(
        maker.nodes,
        "g",
        [
            helper.make_tensor_value_info(
                each.name, TensorProto.INT64 if each.is_key else TensorProto.FLOAT, ["n", *each.sizes]
            )
            for each in maker.inputs
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in names],
        [numpy_helper.from_array(array, name) for name, array in maker.constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", maker.opset)], ir_version=8)
    onnx.checker.check_model(model)
    return RandomRanker(model, maker.inputs, f"{text}: {', '.join(maker.steps)}")
