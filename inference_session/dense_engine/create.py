"""Which engine computes a network, by the settings and the device."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from inference_session.config import SessionConfig
from inference_session.dense_engine.base import ConcatOperands, DenseEngine
from inference_session.dense_engine.concat_engine import ConcatEngine
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.device.base import Device
from inference_session.device.host import HOST
from inference_session.errors import ConfigurationError, ModelFormatError

if TYPE_CHECKING:
    from inference_session.device.cuda import CudaDevice

_log = logging.getLogger(__name__)


def check_precision(config: SessionConfig, device: Device) -> None:
    """Refuse a setting `dense_precision` or `dense_engine` that the device does not have: ConfigurationError."""
    if config.dense_precision == "bfloat16" and device is not HOST:
        raise ConfigurationError(
            f"dense_precision cannot be 'bfloat16' on {device.name}: it is for processors, so set device=cpu,"
            " or use 'tf32' or 'float16'"
        )
    if config.dense_engine != "tensorrt":
        return
    if device is HOST:
        raise ConfigurationError("dense_engine cannot be 'tensorrt' on cpu: it is for GPUs, so use 'onnxruntime'")
    if config.dense_precision == "float32":
        raise ConfigurationError(
            "dense_engine cannot be 'tensorrt' with dense_precision 'float32': TensorRT rounds factors of products, so"
            " set dense_precision to 'tf32' or 'float16', or use 'onnxruntime'"
        )


def create_engine(
    path: Path,
    config: SessionConfig,
    device: Device,
    vectors: Collection[str] = (),
    operands: ConcatOperands | None = None,
) -> DenseEngine:
    """The engine of an ONNX file, on the device; raises what the engines and `in_float16` do.

    Args:
        path: the file.
        config: the settings.
        device: where it computes.
        vectors: inputs that look-ups write; the engine may take them in float16 (DenseEngine.narrow_inputs).
        operands: inputs that it may take as columns of one matrix (DenseEngine.concat_inputs); None: it has none.
    """
    found = None
    if operands is not None and NetworkFile(path).may_have("Concat"):
        # Imported where needed: ONNX takes a while to load, a tenth of the time that a process needs to open a model.
        from inference_session.dense_engine.rewrites.concat_inputs import read_with_concat_inputs

        found = read_with_concat_inputs(path, operands)
    if found is None:
        return _create(NetworkFile(path), config, device, vectors)
    written = {*vectors, *(concat.name for concat in found.concat_inputs)}
    return ConcatEngine(_create(found.network, config, device, written), found.concat_inputs, device)


def _create(network: NetworkFile, config: SessionConfig, device: Device, vectors: Collection[str]) -> DenseEngine:
    if config.dense_precision == "bfloat16":
        return _open_in_bfloat16(network, config)
    if config.dense_precision != "float16":
        return _open(network, config, device)
    # Imported where needed: the converter, and ONNX below it, take a while to load.
    from inference_session.dense_engine.rewrites.float16 import in_float16, not_in_float16

    if device is HOST:
        _log.warning(
            "%s: dense_precision 'float16' makes a network on the CPU less exact, not faster; use 'float32'",
            network.path,
        )
    narrowed = () if device is HOST or config.dense_engine == "tensorrt" else vectors
    narrow = in_float16(network, narrowed)
    try:
        return _open(narrow, config, device)
    except ModelFormatError as error:
        raise not_in_float16(network.path, error) from error


def _open_in_bfloat16(network: NetworkFile, config: SessionConfig) -> DenseEngine:
    from inference_session.dense_engine.openvino import OpenVinoEngine

    engine = OpenVinoEngine(network, num_threads=config.num_dense_threads)
    found, wanted = engine.num_products, engine.num_all_products
    level = logging.INFO if found else logging.WARNING
    _log.log(level, "%s: OpenVINO computes %d of %d matrix products in bfloat16", network.path, found, wanted)
    return engine


def _open(network: NetworkFile, config: SessionConfig, device: Device) -> OnnxEngine:
    if device is HOST:
        return OnnxEngine(network, num_threads=config.num_dense_threads)
    num_threads, gpu = config.num_dense_threads, cast("CudaDevice", device)
    if config.dense_engine == "tensorrt":
        from inference_session.dense_engine.tensorrt import TensorRtEngine

        in_float16, max_samples = config.dense_precision == "float16", config.tensorrt_max_samples
        return TensorRtEngine(network, num_threads=num_threads, gpu=gpu, in_float16=in_float16, max_samples=max_samples)
    from inference_session.dense_engine.cuda import CudaEngine

    use_tf32 = config.dense_precision == "tf32"
    return CudaEngine(network, num_threads=num_threads, gpu=gpu, use_tf32=use_tf32)
