"""A dense network in float16, with its original inputs and outputs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from google.protobuf.message import EncodeError
from onnx import ModelProto, NodeProto, TensorProto
from onnxruntime.transformers.float16 import convert_float_to_float16

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.rewrites.cross_layers import merge_cross_layers
from inference_session.dense_engine.rewrites.parts import read_network
from inference_session.dense_engine.rewrites.relu_layers import merge_relu_layers
from inference_session.errors import UnsupportedModelError
from inference_session.onnx_graphs import reads

_CONVERSION_ERRORS = (AssertionError, EncodeError, ValueError, RuntimeError)
"""What the converter raises, for instance of networks of 2 GiB and more."""


def in_float16(network: NetworkFile, vectors: Collection[str] = ()) -> NetworkFile:
    """The same network, computed in float16; its float32 inputs and outputs stay so.

    Constants beyond float16's range become its largest number, and those that would vanish its smallest.
    Operators that ONNX Runtime's converter leaves in float32 stay so, between casts.

    Args:
        network: it is not changed.
        vectors: inputs that may be float16 as well: those of them are that the network would convert first.

    Raises:
        ModelFormatError: the file, or the one with its weights, is missing or damaged.
        UnsupportedModelError: the network cannot be converted.
    """
    model = read_network(network)
    try:
        merge_cross_layers(model)
        converted: ModelProto = convert_float_to_float16(model, keep_io_types=True)
        merge_relu_layers(converted)
        _narrow(converted, vectors)
        return network._replace(made=converted.SerializeToString())
    except _CONVERSION_ERRORS as error:
        raise not_in_float16(network.path, error) from error


def _narrow(model: ModelProto, names: Collection[str]) -> None:
    """Let inputs be float16 that nothing reads but casts to float16, which ONNX Runtime then removes."""
    readers: dict[str, list[NodeProto]] = {name: [] for name in names}
    for node in model.graph.node:
        for name in reads(node) & readers.keys():
            readers[name].append(node)
    for tensor in model.graph.input:
        casts = readers.get(tensor.name)
        if casts and all(map(_casts_to_float16, casts)):
            tensor.type.tensor_type.elem_type = TensorProto.FLOAT16


def _casts_to_float16(node: NodeProto) -> bool:
    return node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT16


def not_in_float16(path: Path, error: Exception) -> UnsupportedModelError:
    """An error that says that the network at `path` cannot be computed in float16, and what to do."""
    reason = str(error).removeprefix(f"{path}: ")
    return UnsupportedModelError(
        f"{path}: dense_precision 'float16' cannot be used for this network, use 'float32' or 'tf32': {reason}"
    )
