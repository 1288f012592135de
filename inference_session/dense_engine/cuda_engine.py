"""The dense engine on ONNX Runtime's CUDA provider, on the stream that the look-up runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from inference_session.dense_engine.onnx_engine import OnnxEngine
from inference_session.errors import ConfigurationError

PROVIDER = "CUDAExecutionProvider"


class CudaEngine(OnnxEngine):
    """One ONNX file on a GPU. Inputs that CuPy has on the device are read there; outputs come back to the host."""

    def __init__(self, path: Path, *, num_threads: int, device_id: int, stream: int, use_tf32: bool) -> None:
        """`stream`: the CUDA stream to run on, as an address; `use_tf32`: let matrix products round their inputs to
        10 bits, for relative errors of about 1e-3.

        Raises:
            ConfigurationError: ONNX Runtime has no CUDA provider, or could not start it here.
        """
        if reason := unusable():
            raise ConfigurationError(f"device cannot be 'cuda:{device_id}': {reason}")
        self._device_id = device_id
        settings = {
            "device_id": str(device_id),
            "user_compute_stream": str(stream),
            "use_tf32": str(int(use_tf32)),
            "arena_extend_strategy": "kSameAsRequested",
        }
        super().__init__(path, num_threads=num_threads, providers=[(PROVIDER, settings), "CPUExecutionProvider"])
        if self.provider != PROVIDER:
            raise ConfigurationError(
                f"device cannot be 'cuda:{device_id}': ONNX Runtime gave {self.provider} instead of {PROVIDER}:"
                " it did not find the CUDA and cuDNN libraries it was built for, or they do not fit the driver"
            )

    def _compute(self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        binding = session.io_binding()
        for name, array in inputs.items():
            if isinstance(array, np.ndarray):
                binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))
            else:
                binding.bind_input(name, "cuda", self._device_id, np.float32, array.shape, array.data.ptr)
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        results: list[np.ndarray[Any, Any]] = binding.copy_outputs_to_cpu()
        return results


def unusable() -> str | None:
    """Why ONNX Runtime cannot run on a GPU; None: it may."""
    preload = getattr(onnxruntime, "preload_dlls", None)
    if PROVIDER not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu in place of onnxruntime"
    if preload is not None:  # finds libraries that pip has installed
        preload()
    return None
