"""A network reads vectors and inputs of requests as one matrix, instead of putting them side by side itself.

Recommender networks often begin with Concat([vectors, dense inputs]), which copies all of its operands, and whose
result is multiplied with a constant matrix. A product does not depend on the order of the columns of one matrix, if
the rows of the other are in the same order. So look-ups can write vectors straight into the matrix that the product
reads: first the vectors, so that each is aligned, then the inputs of requests, then zeros up to the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, shape_inference
from onnx.external_data_helper import uses_external_data
from onnx.shape_inference import InferenceError

from inference_session.dense_engine.base import ConcatInput, ConcatOperands, GivenColumns
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.rewrites.products import Product, Products
from inference_session.onnx_graphs import attribute, drop_unused

_NAME = "hotrow_concat"
_SHAPING = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the order of elements."""
_OPEN = -1
_WIDTH_STEP = 16
"""Widths are multiples of this: rows of float32 begin at a line of the processor's caches, and those of float16 where a
GPU reads 32 bytes at once.
"""
_MALFORMED = (IndexError, InferenceError, RecursionError, TypeError, ValueError)
"""Raised for networks that violate ONNX's specification: operators without operands, constants of too few bytes."""


class ConcatNetwork(NamedTuple):
    """A network with concat inputs."""

    network: NetworkFile
    concat_inputs: tuple[ConcatInput, ...]


class _Column(NamedTuple):
    """Where an input is among the columns of the original matrix."""

    name: str
    first: int
    width: int


def read_with_concat_inputs(path: Path, inputs: ConcatOperands) -> ConcatNetwork | None:
    """The network of an ONNX file with concat inputs; None where it has none, or weights in other files."""
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except (OSError, DecodeError):  # the engine says why
        return None
    if any(map(uses_external_data, model.graph.initializer)):
        return None
    try:
        found = replace_concats(model, inputs)
    except _MALFORMED:  # the engine says what is wrong
        return None
    return ConcatNetwork(NetworkFile(path, model.SerializeToString()), found) if found else None


def replace_concats(model: ModelProto, inputs: ConcatOperands) -> tuple[ConcatInput, ...]:
    """Rewrite a network in place; returns its concat inputs. Raises _MALFORMED."""
    network = _Network(model, inputs)
    replaced = [network.replace(node) for node in [*model.graph.node] if node.op_type == "Concat"]
    found = tuple(each for each in replaced if each is not None)
    if found:
        drop_unused(model.graph)
    return found


class _Network:
    """A network that is rewritten."""

    def __init__(self, model: ModelProto, inputs: ConcatOperands) -> None:
        self._graph, self._inputs, self._products = model.graph, inputs, Products(model)
        widths = {**inputs.vectors, **inputs.given}
        operands = [tensor for tensor in model.graph.input if tensor.name in widths and _is_usable(tensor)]
        self._tensors = {
            tensor.name: tensor for tensor in operands if widths[tensor.name] in (None, _declared_width(tensor))
        }
        inferred = shape_inference.infer_shapes(model).graph
        self._sizes = {value.name: _sizes(value) for value in (*inferred.input, *inferred.value_info)}

    def replace(self, concat: NodeProto) -> ConcatInput | None:
        """Replace the result of a Concat by an input; None where that cannot be done."""
        columns = self._columns(concat)
        products = self._products_of(concat.output[0])
        vectors = [columns[name] for name in self._inputs.vectors if name in columns]
        given = [column for column in columns.values() if column.name not in self._inputs.vectors]
        total = sum(column.width for column in columns.values())
        if not products or not vectors or not given or any(product.matrix.shape[0] != total for product in products):
            return None
        new = ConcatInput(
            self._products.names.fresh(_NAME),
            tuple(column.name for column in vectors),
            sum(column.width for column in vectors),
            tuple(GivenColumns(column.name, column.width) for column in given),
            -(-total // _WIDTH_STEP) * _WIDTH_STEP,
        )
        for product in products:
            self._reorder(product, new, [*vectors, *given])
        self._replace_inputs(new, columns)
        return new

    def _columns(self, concat: NodeProto) -> dict[str, _Column]:
        """The operands of a Concat, by the inputs that they are; none unless all are in `inputs`, in the
        form of a matrix, and nothing else reads them.
        """
        columns: dict[str, _Column] = {}
        first = 0
        for operand in self._operands(concat):
            name = self._source(operand)
            if name not in self._tensors or name in columns or self._products.user(name) is None:
                return {}
            width = _declared_width(self._tensors[name])
            if self._sizes.get(operand, ())[1:] != (width,):
                return {}
            columns[name] = _Column(name, first, width)
            first += width
        return columns

    def _source(self, name: str) -> str:
        """The value that has the same elements in the same order, and that is used for this one alone."""
        maker = self._products.maker(name)
        while maker is not None and maker.op_type in _SHAPING and not maker.domain:
            name = maker.input[0]
            maker = self._products.maker(name)
        return name

    def _operands(self, concat: NodeProto) -> Iterator[str]:
        """Those of a Concat of matrices side by side, and of others that are operands of it."""
        if concat.domain or helper.get_node_attr_value(concat, "axis") not in (1, -1):
            yield ""
            return
        for name in concat.input:
            maker = self._products.maker(name)
            if maker is not None and maker.op_type == "Concat":
                yield from self._operands(maker)
            else:
                yield name

    def _products_of(self, name: str) -> list[Product]:
        """The products that read a value; none if anything else does as well."""
        products = [self._products.product_of(node) for node in self._products.users(name)]
        found = [product for product in products if product is not None and product.value == name]
        return found if len(found) == len(products) else []

    def _reorder(self, product: Product, new: ConcatInput, ordered: list[_Column]) -> None:
        """Let a product read the concat input."""
        matrix = np.zeros((new.width, product.matrix.shape[1]), product.matrix.dtype)
        rows = [product.matrix[column.first : column.first + column.width] for column in ordered]
        matrix[: len(product.matrix)] = np.concatenate(rows)
        node = product.nodes[-1]
        stored = np.ascontiguousarray(matrix.T) if attribute(node, "transB", 0) else matrix
        node.input[:2] = [new.name, self._products.add_constant(f"{node.output[0]}/matrix", stored)]

    def _replace_inputs(self, new: ConcatInput, columns: Mapping[str, _Column]) -> None:
        """Its size of samples stands for those of all inputs that it replaces: engines tell shapes by their names."""
        firsts = [tensor.type.tensor_type.shape.dim[0] for name, tensor in self._tensors.items() if name in columns]
        symbols = {size.dim_param for size in firsts if size.dim_param}
        symbol = min(symbols, default=None)
        for value in (*self._graph.input, *self._graph.output, *self._graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if size.dim_param in symbols:
                    size.dim_param = symbol
        kept = [tensor for tensor in self._graph.input if tensor.name not in columns]
        info = helper.make_tensor_value_info(new.name, TensorProto.FLOAT, [symbol, new.width])
        del self._graph.input[:]
        self._graph.input.extend([info, *kept])


def _is_usable(tensor: ValueInfoProto) -> bool:
    """Whether an input is float32 of any number of samples, and of as many elements for each."""
    first, *others = _sizes(tensor) or (0,)
    is_float = tensor.type.tensor_type.elem_type == TensorProto.FLOAT
    return is_float and first == _OPEN and min(others, default=1) > 0


def _declared_width(tensor: ValueInfoProto) -> int:
    return math.prod(_sizes(tensor)[1:])


def _sizes(value: ValueInfoProto) -> Sequence[int]:
    """Of its dimensions, _OPEN for those that are not fixed."""
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") else _OPEN for size in sizes)
