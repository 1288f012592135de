"""Matrix products of a network with constant matrices, and the biases that are added to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from inference_session.onnx_graphs import Names, attributes, constants, producers, reads

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


class Product(NamedTuple):
    """value @ matrix + bias."""

    value: str
    matrix: NDArray[Any]
    bias: NDArray[Any] | None
    nodes: tuple[NodeProto, ...]
    """What adds the bias, if that is a node of its own, and what multiplies."""


class Products:
    """A network, and where its values come from."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._makers = producers(model.graph)
        self._users: dict[str, list[NodeProto | None]] = {value.name: [None] for value in model.graph.output}
        for node in model.graph.node:
            for name in reads(node):
                self._users.setdefault(name, []).append(node)
        given = {value.name for value in model.graph.input}
        self._constants = {name: tensor for name, tensor in constants(model.graph).items() if name not in given}
        self.names = Names.unused_in(model.graph)

    def maker(self, name: str) -> NodeProto | None:
        """The node that computes a value that one node uses."""
        return self._makers.get(name) if len(self._users.get(name, ())) == 1 else None

    def user(self, name: str) -> NodeProto | None:
        """The only node that uses a value."""
        users = self._users.get(name, ())
        return users[0] if len(users) == 1 else None

    def users(self, name: str) -> list[NodeProto | None]:
        """The nodes that use a value; None among them: it is an output of the network."""
        return self._users.get(name, [])

    def product(self, name: str) -> Product | None:
        """The product that a value is, one that nothing else uses."""
        return self.product_of(self.maker(name))

    def product_of(self, node: NodeProto | None) -> Product | None:
        """The product that a node computes, or adds a bias to."""
        for summed, bias_name in operands(node, "Add"):
            bias, product = self._constant(bias_name, 1), self.product(summed)
            if bias is not None and product is not None and product.bias is None and node is not None:
                return product._replace(bias=bias, nodes=(node, *product.nodes))
        if node is None or node.op_type not in {"MatMul", "Gemm"} or node.domain:
            return None
        settings = attributes(node)
        is_transposed = settings.pop("transB", 0)
        matrix = self._constant(node.input[1], 2)
        has_bias = len(node.input) > 2 and node.input[2]
        bias = self._constant(node.input[2], 1) if has_bias else None
        if matrix is None or (has_bias and bias is None) or any(settings.get(n, 1) != 1 for n in ("alpha", "beta")):
            return None
        if settings.get("transA", 0):
            return None
        return Product(node.input[0], matrix.T if is_transposed else matrix, bias, (node,))

    def add_constant(self, name: str, array: NDArray[Any]) -> str:
        """A new constant; returns its name, which is not exactly `name` if another value has that one."""
        name = self.names.fresh(name)
        self._constants[name] = numpy_helper.from_array(array, name)
        self._graph.initializer.append(self._constants[name])
        return name

    def _constant(self, name: str, rank: int) -> NDArray[Any] | None:
        tensor = self._constants.get(name)
        if tensor is None or len(tensor.dims) != rank or tensor.data_type not in _FLOATS:
            return None
        return numpy_helper.to_array(tensor)


def operands(node: NodeProto | None, op_type: str) -> Iterator[tuple[str, str]]:
    """Both orders of the operands of a sum or product."""
    if node is not None and node.op_type == op_type and not node.domain:
        left, right = node.input
        yield left, right
        yield right, left
