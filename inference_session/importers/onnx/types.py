"""Element types and shapes of a model's values, as far as ONNX's own inference can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper, shape_inference

from inference_session.importers.onnx.weights import Weight
from inference_session.onnx_graphs import all_graphs

Dims = tuple[int | str | None, ...]
"""A size, a symbol, or None for a dimension that nothing is known of."""
NUMPY_TYPES = frozenset(
    TensorProto.DataType.Value(name)
    for name in (
        *("BOOL", "STRING", "FLOAT16", "FLOAT", "DOUBLE", "COMPLEX64", "COMPLEX128"),
        *("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    )
)
"""The element types that NumPy itself has. Some versions of onnx give float32 for others."""


@dataclass(frozen=True)
class ValueType:
    """The known facts about one value."""

    elem_type: int
    dims: Dims | None
    """None: not even the rank is known."""


class Types:
    """The types of all tensors of a model, by name."""

    def __init__(self, model: ModelProto, weights: dict[str, Weight]) -> None:
        self._types = {name: ValueType(weight.elem_type, weight.dims) for name, weight in weights.items()}
        for graph in all_graphs(_inferred(model, weights).graph):
            for tensor in graph.initializer:
                self._types[tensor.name] = ValueType(tensor.data_type, tuple(tensor.dims))
            for value in (*graph.input, *graph.value_info, *graph.output):
                self._types.setdefault(value.name, value_type(value))

    def elem_type(self, name: str) -> int:
        """TensorProto's number; 0 where unknown."""
        return self._types[name].elem_type if name in self._types else 0

    def dims(self, name: str) -> Dims | None:
        """The shape; None where not even the rank is known."""
        return self._types[name].dims if name in self._types else None

    def rank(self, name: str) -> int | None:
        """The number of dimensions, where known."""
        dims = self.dims(name)
        return None if dims is None else len(dims)


def value_type(value: ValueInfoProto) -> ValueType:
    """The declared type of a graph's input, output or inner value."""
    tensor: TypeProto.Tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return ValueType(tensor.elem_type, None)
    return ValueType(tensor.elem_type, tuple(_dim(dim) for dim in tensor.shape.dim))


def _dim(dim: Any) -> int | str | None:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # -1 is how some exporters write an open size
        return int(dim.dim_value)
    return str(dim.dim_param) or None


def _inferred(model: ModelProto, weights: dict[str, Weight]) -> ModelProto:
    """The model with inferred types; weights become inputs because their values are elsewhere."""
    probe = ModelProto()
    probe.CopyFrom(model)
    for name, weight in weights.items():
        probe.graph.input.append(helper.make_tensor_value_info(name, weight.elem_type, weight.dims))
    try:
        return shape_inference.infer_shapes(probe, data_prop=True)
    except (shape_inference.InferenceError, ValueError):
        return probe  # only the exporter's declarations are known
