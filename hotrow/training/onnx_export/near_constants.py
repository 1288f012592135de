"""Constants that PyTorch's ONNX optimizer would round are kept from it.

It takes a number as near as 1e-8 to 0 for 0, and one as near as 1e-5 to 1 for 1, and drops what adds or multiplies it:
`x / (count + 1e-8)` became `x / count`, which is NaN for an empty list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper

from inference_session.onnx_graphs import all_nodes

_NEAR = 1e-4
"""More than the optimizer's tolerances."""


def optimized(exported: Any) -> ModelProto:
    """A model that PyTorch has exported with `optimize=False`, optimized."""
    hidden = _hide(exported.model.graph)
    exported.optimize()
    model: ModelProto = exported.model_proto
    inputs = [value for value in model.graph.input if value.name not in hidden]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    read = {name for node in all_nodes(model.graph) for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(hidden[name], name) for name in hidden if name in read)
    return model


def _hide(graph: ir.Graph) -> dict[str, NDArray[Any]]:
    """Put inputs in the places of such constants; returns the constants by the inputs' names."""
    hidden: dict[str, NDArray[Any]] = {}
    for node in [node for node in graph.all_nodes() if node.op_type == "Constant" and "value" in node.attributes]:
        tensor, constant = node.attributes["value"].as_tensor(), node.outputs[0]
        if _is_near(array := tensor.numpy()) and not constant.is_graph_output():
            name = f"{constant.name}_exact_{len(hidden)}"  # branches may have constants of one name
            value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype))
            ir.convenience.replace_all_uses_with(constant, value)
            node.graph.remove(node, safe=True)
            graph.inputs.append(value)
            hidden[name] = array
    return hidden


def _is_near(array: NDArray[Any]) -> bool:
    """Whether this is one number that is nearly 0 or 1. Only numbers without a dimension are rounded."""
    if array.ndim or array.dtype.kind != "f":
        return False
    return any(number != array and bool(np.abs(array - number) < _NEAR) for number in (0, 1))
