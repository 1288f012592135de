"""Runs models with ONNX Runtime, quietly, and pieces of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, save_model
from onnx.reference import ReferenceEvaluator

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.model_spec import NamedArrays
from inference_session.onnx_graphs import constants, make_node, needed_nodes, reads
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
    network = NetworkFile(Path(), model) if isinstance(model, bytes) else NetworkFile(model)
    return onnxruntime.InferenceSession(
        path_for_library(network.path) if network.made is None else network.made,
        options,
        providers=["CPUExecutionProvider"],
        enable_fallback=0,  # it prints to stdout and tries the same provider again
        disabled_optimizers=network.harmful_optimizers() if optimised else [],
    )


def fixed_value(model: ModelProto, scope: GraphProto, name: str) -> NDArray[Any] | None:
    """A value of the model's main graph, or of a body in it; None unless it follows from the main graph's constants."""
    nodes = needed_nodes(scope.node, [name])
    given = {name}.union(*(reads(node) for node in nodes)) - {output for node in nodes for output in node.output}
    if not given <= set(constants(model.graph)):
        return None
    output = f"{name}_value"
    return run_piece(model, [*nodes, make_node("Identity", [name], output)], model.graph.initializer, output)


def run_piece(
    model: ModelProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto], output: str
) -> NDArray[Any]:
    """A value that ONNX Runtime computes by some of a model's nodes from constants; raises its errors."""
    piece = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    piece.graph.name = "piece"
    piece.graph.initializer.extend(constants)
    piece.graph.node.extend(nodes)
    piece.graph.output.append(ValueInfoProto(name=output))
    value: NDArray[Any] = open_network(piece.SerializeToString()).run([output], {})[0]
    return value


def reference_values(
    nodes: Iterable[NodeProto], outputs: Sequence[str], feeds: NamedArrays, model: ModelProto
) -> list[NDArray[Any]] | None:
    """The outputs that ONNX's own evaluator computes by some of a model's nodes; None where it lacks an operator."""
    given, wanted = ([ValueInfoProto(name=name) for name in names] for names in (feeds, outputs))
    graph = helper.make_graph(list(nodes), "piece", given, wanted)
    piece = helper.make_model(graph, opset_imports=list(model.opset_import))
    try:
        return [np.asarray(value) for value in ReferenceEvaluator(piece).run(list(outputs), dict(feeds))]
    except Exception:  # noqa: BLE001  it raises any type; each means "not these"
        return None
