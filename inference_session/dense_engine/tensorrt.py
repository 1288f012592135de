"""The dense engine of `dense_engine` `tensorrt`: TensorRT through ONNX Runtime's provider for it.

TensorRT compiles the network when a version is opened, for batches of 1 to `tensorrt_max_samples` samples. What it
cannot compute runs on the CUDA provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference_session.dense_engine.base import PreparedRuns
from inference_session.dense_engine.cuda import CudaBoundRun, CudaEngine, device_option
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
from inference_session.dense_engine.tensorrt_profile import profile_shapes
from inference_session.device.cuda import CudaDevice
from inference_session.device.discovery import PROVIDER, TENSORRT_PROVIDER, unusable_tensorrt
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.platform.user_cache import user_cache_folder


class TensorRtEngine(CudaEngine):
    """One ONNX file that TensorRT computes."""

    expected_provider = TENSORRT_PROVIDER

    def __init__(
        self, network: NetworkFile, *, num_threads: int, gpu: CudaDevice, in_float16: bool, max_samples: int
    ) -> None:
        """`max_samples`: of a batch.

        Raises:
            ConfigurationError: TensorRT is not installed, or could not be started.
            ModelFormatError: the file cannot be read.
            UnsupportedModelError: TensorRT cannot compute this network.
        """
        if reason := unusable_tensorrt():
            raise ConfigurationError(f"dense_engine cannot be 'tensorrt', use 'onnxruntime': {reason}")
        self._max_samples = max_samples
        self._settings = {
            **device_option(gpu),
            "user_compute_stream": str(gpu.stream.ptr),
            "trt_fp16_enable": str(int(in_float16)),
            "trt_timing_cache_enable": "1",  # it holds durations of kernels, and no results of a network
            "trt_timing_cache_path": str(user_cache_folder() / "tensorrt"),
            **profile_shapes(network, max_samples),
        }
        super().__init__(network, num_threads=num_threads, gpu=gpu, use_tf32=True)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str], prepared: PreparedRuns | None = None) -> list[Any]:
        self._check_samples(inputs)
        return super().run(inputs, outputs, prepared)

    def bind(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> CudaBoundRun | None:
        self._check_samples(inputs)
        return super().bind(inputs, outputs)

    def _open_on_gpu(self, network: NetworkFile, num_threads: int, settings: dict[str, str]) -> None:
        providers = [(TENSORRT_PROVIDER, self._settings), (PROVIDER, settings), "CPUExecutionProvider"]
        try:
            OnnxEngine.__init__(self, network, num_threads=num_threads, providers=providers)
        except RuntimeError as error:  # where a library that the provider needs is missing
            raise ConfigurationError(f"dense_engine cannot be 'tensorrt', use 'onnxruntime': {error}") from error
        self._may_record = False  # graphs are the CUDA provider's

    def _check_samples(self, inputs: Mapping[str, Any]) -> None:
        num_samples = max((len(array) for array in inputs.values() if array.ndim), default=0)
        if num_samples > self._max_samples:
            raise InvalidRequestError(
                f"{num_samples} samples at once are more than setting tensorrt_max_samples allows ({self._max_samples})"
            )
