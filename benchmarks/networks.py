"""Networks of the benchmarks, in ONNX's text form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx.parser
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper


def network_of(graph: str, constants: Mapping[str, NDArray[Any]]) -> ModelProto:
    """The model of a graph's text, with these initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return model


def mlp(source: str, output: str, layers: Sequence[NDArray[np.float32]]) -> tuple[str, dict[str, NDArray[Any]]]:
    """The text of fully connected layers, with ReLU between them and Sigmoid at the end, and their constants."""
    lines: list[str] = []
    constants: dict[str, NDArray[Any]] = {}
    for i, layer in enumerate(layers):
        constants |= {f"w{i}": layer, f"b{i}": np.zeros(layer.shape[1], np.float32)}
        activated = f"{output} = Sigmoid" if i + 1 == len(layers) else f"activated{i} = Relu"
        lines.append(f"layer{i} = Gemm({source}, w{i}, b{i}) {activated}(layer{i})")
        source = f"activated{i}"
    return " ".join(lines), constants
