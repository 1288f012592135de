"""Finds the part of a network that consists of layers, which an engine other than ONNX Runtime may compute.

A layer computes each sample by itself, from float32 values of shape [n, fixed sizes] and constants. In such a
part only the number of samples depends on a request, so no request can make an engine fail that does not check
shapes or row numbers. All other operators, and those that they need, are left to ONNX Runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper, shape_inference

from inference_session.dense_engine.rewrites.parts import part_of
from inference_session.onnx_graphs import attribute, bodies, constants, is_random, reads

_PRODUCTS = ("MatMul", "Gemm")
_SHAPE = "/hotrow_shape"
"""Ends the names of shapes that we write."""


class Division(NamedTuple):
    """A network in two parts; the second may read what the first computes."""

    first: ModelProto | None
    """What is left to ONNX Runtime; None: nothing."""
    layers: ModelProto | None
    """None: the network has no layers with a matrix product."""
    row_shapes: dict[str, tuple[int, ...]]
    """By input of `layers`: the fixed sizes behind the samples."""
    inputs: tuple[str, ...]
    """The inputs of the whole network."""
    outputs: tuple[str, ...]
    num_products: int
    """Matrix products in `layers`."""
    num_all_products: int


def divide_layers(model: ModelProto) -> Division:
    """Divide a network; raises what ONNX's shape inference raises for a network that is too large for it."""
    network = _Network(model)
    first, layers = network.sorted_nodes()
    products = [node for node in model.graph.node if node.op_type in _PRODUCTS]
    num_products = sum(node.op_type in _PRODUCTS for node in layers)
    outputs = list(network.model.graph.output)
    inputs = [value for value in network.model.graph.input if value.name not in network.constants]
    given = {value.name for value in inputs}
    names = tuple(value.name for value in inputs), tuple(value.name for value in outputs)
    if not num_products:
        return Division(network.model, None, {}, *names, 0, len(products))
    made = {name for node in layers for name in node.output}
    read = {name for node in layers for name in node.input if name} - made - network.constants
    border = [network.values[name] for name in sorted(read - given)]
    own = [network.values[name] for name in sorted(read)]
    of_layers = [value for value in outputs if value.name in made]
    of_first = [value for value in outputs if value.name not in made]
    names_of_first = {value.name for value in of_first}
    before_layers = [*of_first, *(value for value in border if value.name not in names_of_first)]
    return Division(
        part_of(network.model, inputs, before_layers, ()) if first or of_first else None,
        part_of(network.model, own, of_layers, read),
        {name: network.row_shape(name) or () for name in sorted(read)},
        *names,
        num_products,
        len(products),
    )


class _Network:
    """A network whose shapes have been inferred."""

    def __init__(self, model: ModelProto) -> None:
        self._infer(model)
        while self._fix_reshapes():  # what is behind them may be known now
            self._infer(self.model)

    def _infer(self, model: ModelProto) -> None:
        self.model = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        graph = self.model.graph
        self.values: dict[str, ValueInfoProto] = {
            value.name: value for values in (graph.input, graph.value_info, graph.output) for value in values
        }
        self._tensors = constants(graph)
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._tensors[node.output[0]] = node.attribute[0].t
        self.constants = set(self._tensors)
        for node in graph.node:
            if reads(node) <= self.constants and not bodies(node) and not is_random(node):
                self.constants.update(node.output)

    def sorted_nodes(self) -> tuple[list[NodeProto], list[NodeProto]]:
        """The nodes that are left to ONNX Runtime, and the layers; those that nothing needs are in neither."""
        needed, left = {value.name for value in self.model.graph.output}, set[str]()
        first, layers = list[NodeProto](), list[NodeProto]()
        for node in reversed(self.model.graph.node):
            if not needed.intersection(node.output) or self.constants.issuperset(node.output):
                continue
            needed |= reads(node)
            if left.isdisjoint(node.output) and self._is_layer(node):
                layers.append(node)
            else:
                first.append(node)
                left |= reads(node)
        return first, layers

    def row_shape(self, name: str) -> tuple[int, ...] | None:
        """The sizes behind the first dimension of float32 values, where that one is open and the others are known."""
        value = self.values.get(name)
        if name in self.constants or value is None or value.type.tensor_type.elem_type != TensorProto.FLOAT:
            return None
        dims = value.type.tensor_type.shape.dim
        if not dims or dims[0].HasField("dim_value") or not all(dim.HasField("dim_value") for dim in dims[1:]):
            return None
        return tuple(dim.dim_value for dim in dims[1:])

    def constant(self, node: NodeProto, position: int) -> NDArray[np.generic] | None:
        """An input of a node, if it is written in the file."""
        name = node.input[position] if position < len(node.input) else ""
        return numpy_helper.to_array(self._tensors[name]) if name in self._tensors else None

    def variables(self, node: NodeProto) -> list[tuple[int, ...]]:
        """The row shapes of a node's inputs that are not constants."""
        return [self.row_shape(name) or () for name in node.input if name and name not in self.constants]

    def constant_ranks(self, node: NodeProto) -> list[int] | None:
        """For each constant that a node reads, its number of dimensions after leading ones; None: not known."""
        ranks = []
        for name in node.input:
            if name and name in self.constants:
                shape = self._constant_shape(name)
                if shape is None:
                    return None
                ranks.append(len(shape) - next((i for i, size in enumerate(shape) if size != 1), len(shape)))
        return ranks

    def _constant_shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._tensors:
            return tuple(self._tensors[name].dims)
        value = self.values.get(name)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)

    def _is_layer(self, node: NodeProto) -> bool:
        check = _CHECKS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        read = [name for name in node.input if name and name not in self.constants]
        return (
            check is not None
            and bool(read)
            and all(self.row_shape(name) is not None for name in (*read, *node.output))
            and check(self, node)
        )

    def _fix_reshapes(self) -> bool:
        """Write shapes that follow from the number of samples alone into the network; returns whether any did."""
        num_before = len(self.model.graph.initializer)
        for node in self.model.graph.node:
            if node.op_type == "Reshape" and not _is_reshape(self, node) and node.input[0] not in self.constants:
                row_shape = self._reshaped(node)
                if row_shape is not None:
                    tensor = numpy_helper.from_array(np.array([0, *row_shape], np.int64), node.output[0] + _SHAPE)
                    self.model.graph.initializer.append(tensor)
                    node.input[1] = tensor.name
                    del node.attribute[:]
        return len(self.model.graph.initializer) > num_before

    def _reshaped(self, node: NodeProto) -> tuple[int, ...] | None:
        """The row shape that a Reshape gives, where it leaves samples what they are."""
        before = self.row_shape(node.input[0])
        if before is None or node.output[0] not in self.values:
            return None
        own, *dims = self.values[node.output[0]].type.tensor_type.shape.dim or [None]
        sizes = [dim.dim_value for dim in dims]
        known, size = math.prod(filter(None, sizes)), math.prod(before)
        if own is None or own.HasField("dim_value") or not size or size % known:
            return None
        samples = self.values[node.input[0]].type.tensor_type.shape.dim[0].dim_param
        if sizes.count(0) == 1 and samples and own.dim_param == samples:
            return tuple(size // known if each == 0 else each for each in sizes)
        return tuple(sizes) if known == size and 0 not in sizes else None


def _is_elementwise(network: _Network, node: NodeProto) -> bool:
    """Samples are aligned: values have the same number of dimensions, and no constant extends over the samples."""
    (rank, *others) = {1 + len(shape) for shape in network.variables(node)}
    constants = network.constant_ranks(node)
    return not others and constants is not None and all(size < rank for size in constants)


def _is_product(network: _Network, node: NodeProto) -> bool:
    variables = network.variables(node)
    if len(variables) == 2:
        return len(variables[0]) == len(variables[1]) >= 2
    return node.input[1] in network.constants and network.constant_ranks(node) in ([1], [2])


def _is_gemm(network: _Network, node: NodeProto) -> bool:
    """Whether it multiplies values by a constant matrix, and adds a bias that is the same for all samples."""
    ranks = network.constant_ranks(node)
    return (
        _reads_first_only(network, node)
        and not attribute(node, "transA", 0)
        and ranks is not None
        and all(rank < 2 for rank in ranks[1:])
    )


def _is_concatenation(network: _Network, node: NodeProto) -> bool:
    shapes = network.variables(node)
    is_plain = len(shapes) == len(node.input) and len({len(shape) for shape in shapes}) == 1
    return is_plain and _spares_samples(network, node, [attribute(node, "axis", 0)])


def _is_reshape(_: _Network, node: NodeProto) -> bool:
    """One whose shape `_fix_reshapes` has written."""
    return bool(node.input[1].endswith(_SHAPE))


def _is_choice(network: _Network, node: NodeProto) -> bool:
    """A Gather of columns that are known."""
    columns, axis = network.constant(node, 1), attribute(node, "axis", 0)
    if columns is None or not _reads_first_only(network, node):
        return False
    (shape,) = network.variables(node)
    axis += 1 + len(shape) if axis < 0 else 0
    if not 0 < axis <= len(shape):
        return False
    size = shape[axis - 1]
    return bool(((columns >= -size) & (columns < size)).all())  # type: ignore[operator]  # they are whole numbers


def _follows_axis(default: int) -> Callable[[_Network, NodeProto], bool]:
    def check(network: _Network, node: NodeProto) -> bool:
        axes = [attribute(node, "axis", default)]
        return _reads_first_only(network, node) and _spares_samples(network, node, axes)

    return check


def _follows_axes(position: int) -> Callable[[_Network, NodeProto], bool]:
    """The rule for operators whose axes are an attribute, or from some version on the input at `position`."""

    def check(network: _Network, node: NodeProto) -> bool:
        found = [list(item.ints) for item in node.attribute if item.name == "axes"]
        axes = network.constant(node, position)
        if axes is not None:
            found.append(axes.reshape(-1).tolist())
        return _reads_first_only(network, node) and bool(found) and _spares_samples(network, node, found[0])

    return check


def _reads_first_only(network: _Network, node: NodeProto) -> bool:
    """Whether all inputs but the first are constants."""
    return node.input[0] not in network.constants and len(network.variables(node)) == 1


def _spares_samples(network: _Network, node: NodeProto, axes: list[int]) -> bool:
    """Whether none of the axes, which count in what is read or in what is computed, is that of the samples."""
    rank = 1 + max(len(network.row_shape(node.output[0]) or ()), *map(len, network.variables(node)))
    return bool(axes) and all(-rank < axis < rank and axis != 0 for axis in axes)


_CHECKS: dict[str, Callable[[_Network, NodeProto], bool]] = {
    **dict.fromkeys(("Relu", "LeakyRelu", "Elu", "Selu", "Gelu", "Sigmoid", "HardSigmoid", "Tanh"), _is_elementwise),
    **dict.fromkeys(("Softplus", "Erf", "Exp", "Neg", "Sqrt", "Identity", "Clip", "PRelu"), _is_elementwise),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), _is_elementwise),
    "MatMul": _is_product,
    "Gemm": _is_gemm,
    "Concat": _is_concatenation,
    "Reshape": _is_reshape,
    "Transpose": lambda _, node: bool(node.attribute) and node.attribute[0].ints[0] == 0,
    "Gather": _is_choice,
    "Flatten": lambda _, node: attribute(node, "axis", 1) == 1,
    "Softmax": _follows_axis(-1),
    "LayerNormalization": _follows_axis(-1),
    "Split": _follows_axis(0),
    "Squeeze": _follows_axes(1),
    "Unsqueeze": _follows_axes(1),
    "Slice": _follows_axes(3),
    "ReduceSum": _follows_axes(1),
    "ReduceMean": _follows_axes(1),
    "BatchNormalization": lambda network, node: (
        _reads_first_only(network, node) and not attribute(node, "training_mode", 0)
    ),
}
"""Conditions on nodes of each type, in addition to reading and computing rows."""
