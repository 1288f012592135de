"""The sizes of batches that TensorRT compiles a network for."""

from __future__ import annotations

import onnx
from google.protobuf.message import DecodeError

from inference_session.dense_engine.network_file import NetworkFile
from inference_session.errors import ModelFormatError, UnsupportedModelError


def profile_shapes(network: NetworkFile, max_samples: int) -> dict[str, str]:
    """The smallest and largest shapes of a network's inputs, as settings of ONNX Runtime's provider.

    Raises:
        ModelFormatError: the network cannot be read.
        UnsupportedModelError: an input has an open size other than the number of samples.
    """
    try:
        model = onnx.load_model_from_string(network.content())
    except (DecodeError, OSError, ValueError) as error:
        raise ModelFormatError(f"{network.path}: cannot be read: {error}") from error
    smallest, largest = [], []
    for tensor in model.graph.input:
        sizes = [size.dim_value if size.HasField("dim_value") else None for size in tensor.type.tensor_type.shape.dim]
        if None in sizes[1:]:
            raise UnsupportedModelError(
                f"{network.path}: dense_engine 'tensorrt' does not suit this network, use 'onnxruntime': the sizes of"
                f" input {tensor.name!r} are not fixed, apart from the number of samples"
            )
        if sizes and sizes[0] is None:
            rest = "".join(f"x{size}" for size in sizes[1:])
            smallest.append(f"{tensor.name}:1{rest}")
            largest.append(f"{tensor.name}:{max_samples}{rest}")
    return {
        "trt_profile_min_shapes": ",".join(smallest),
        "trt_profile_opt_shapes": ",".join(largest),
        "trt_profile_max_shapes": ",".join(largest),
    }
