"""Runs pieces of a model with ONNX Runtime, quietly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, ValueInfoProto, save_model

from inference_session.importers.onnx.graph import make_node, needed_nodes
from inference_session.platform.file_names import path_for_library

_FATAL = 4
MAX_INLINE_BYTES = 1_900_000_000


def save_network(model: ModelProto, path: Path) -> None:
    """Write a model file, with its weights in a second file next to it if one file cannot hold them."""
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < MAX_INLINE_BYTES:
        save_model(model, path)
    else:
        save_model(model, path, save_as_external_data=True, location=data.name, convert_attribute=False)


def open_network(model: Path | bytes, *, optimised: bool = False) -> Any:
    """An ONNX Runtime session on the CPU that runs a model exactly as it is written, unless it may optimise it."""
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = 1
    source = model if isinstance(model, bytes) else path_for_library(model)
    # ONNX Runtime's fallback prints to stdout and tries the same provider again.
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"], enable_fallback=0)


def evaluate(model: ModelProto, scope: GraphProto, name: str) -> NDArray[Any]:
    """A value of the model's main graph, or of a body in it, that depends on constants of the main graph alone."""
    piece = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.graph.name = "constant"
    piece.graph.initializer.extend(model.graph.initializer)
    piece.graph.node.extend(needed_nodes(scope.node, [name]))
    output = f"{name}_value"
    piece.graph.node.append(make_node("Identity", [name], output))
    piece.graph.output.append(ValueInfoProto(name=output))
    result: NDArray[Any] = open_network(piece.SerializeToString()).run([output], {})[0]
    return result
