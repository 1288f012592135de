"""Shapes of all values of a graph for inputs of given sizes, and the values of those that follow from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper, numpy_helper

from inference_session.importers.onnx.evaluation import reference_values
from inference_session.importers.onnx.types import value_type
from inference_session.importers.onnx.weights import Weight
from inference_session.model_spec import BLOCK_CONTEXT, ROW_CONTEXT

_MAX_KNOWN_ELEMENTS = 4096
Shape = tuple[int, ...]


class Shapes:
    """The results of shape inference for a model whose inputs have these shapes.

    Args:
        shapes: of the graph's inputs, without an open size.
        known: the values of some of these inputs.
    """

    def __init__(
        self,
        model: ModelProto,
        weights: Mapping[str, Weight],
        shapes: Mapping[str, Shape],
        known: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self._opsets = {item.domain or "ai.onnx": int(item.version) for item in model.opset_import}
        self._model = model
        self.types: dict[str, TypeProto] = {}
        self.known: dict[str, NDArray[Any]] = dict(known or {})
        """Values that constants, shapes and known inputs alone determine, where they are small."""
        for name, weight in weights.items():
            self.types[name] = _type(weight.elem_type, weight.dims)
            if np.prod(weight.dims, dtype=np.int64) <= _MAX_KNOWN_ELEMENTS:
                self.known[name] = numpy_helper.to_array(weight.tensor())
        for tensor in model.graph.initializer:
            self.types[tensor.name] = _type(tensor.data_type, tuple(tensor.dims))
            if np.prod(tensor.dims, dtype=np.int64) <= _MAX_KNOWN_ELEMENTS:
                self.known[tensor.name] = numpy_helper.to_array(tensor)
        for value in model.graph.input:
            self.types[value.name] = _type(value.type.tensor_type.elem_type, shapes[value.name])
        self._infer(model.graph)

    def dims(self, name: str) -> Shape | None:
        """The shape of a value; None where it is not known."""
        found = self.types.get(name)
        if found is None or not found.tensor_type.HasField("shape"):
            return None
        dims = found.tensor_type.shape.dim
        return tuple(int(dim.dim_value) for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None

    def elem_type(self, name: str) -> int:
        """TensorProto's number of the element type; 0 where it is not known."""
        found = self.types.get(name)
        return 0 if found is None else int(found.tensor_type.elem_type)

    def _infer(self, graph: GraphProto) -> None:
        for node in graph.node:
            self._infer_types(node)
            if node.op_type in ("Shape", "Size") and not node.domain:
                dims = self.dims(node.input[0])
                if dims is not None:
                    sizes = _part(node, dims) if node.op_type == "Shape" else np.prod(dims, dtype=np.int64)
                    self.known[node.output[0]] = np.array(sizes, np.int64)
            elif node.input and all(name in self.known for name in node.input if name):
                self._evaluate(node)

    def _infer_types(self, node: NodeProto) -> None:
        given = {name: self.types[name] for name in node.input if name in self.types}
        if len(given) < len({name for name in node.input if name}):
            return
        data = {name: numpy_helper.from_array(self.known[name], name) for name in node.input if name in self.known}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(node.domain or "ai.onnx", 1), node.domain)
            found = onnx.shape_inference.infer_node_outputs(
                schema, node, given, data, opset_imports=list(self._model.opset_import), ir_version=10
            )
        except Exception:  # noqa: BLE001  an operator that inference does not know; its outputs stay unknown
            return
        self.types.update(found)

    def _evaluate(self, node: NodeProto) -> None:
        outputs = [name for name in node.output if name]
        sizes = [self.dims(name) for name in outputs]
        if any(dims is None or np.prod(dims, dtype=np.int64) > _MAX_KNOWN_ELEMENTS for dims in sizes):
            return
        values = reference_values([node], outputs, {name: self.known[name] for name in node.input if name}, self._model)
        self.known.update(zip(outputs, values or (), strict=values is not None))


def _type(elem_type: int, dims: Shape) -> TypeProto:
    return helper.make_tensor_type_proto(elem_type, dims)


def _part(node: NodeProto, dims: Shape) -> Shape:
    """The result of Shape, whose attributes may leave dimensions out."""
    limits = {item.name: int(item.i) for item in node.attribute}
    return dims[slice(limits.get("start", 0), limits.get("end", len(dims)))]


def sized(graph: GraphProto, name: str, num_samples: int, inner: int) -> Shape:
    """The shape of an input: a symbol that is the first dimension of any input counts samples everywhere."""
    kinds = {value.name: value_type(value).dims or () for value in graph.input}
    of_samples = kinds.keys() - {ROW_CONTEXT, BLOCK_CONTEXT}
    in_front = {kinds[each][0] for each in of_samples if isinstance(kinds[each][0], str)}
    sizes = [dim if isinstance(dim, int) else num_samples if dim in in_front else inner for dim in kinds[name][1:]]
    return (num_samples, *sizes)
