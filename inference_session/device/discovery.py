"""Whether there is a GPU to use, and why not; imports CuPy only where it is asked for."""

from __future__ import annotations

import ctypes.util
import importlib
import logging
from pathlib import Path

from inference_session.device.base import Device
from inference_session.device.host import HOST
from inference_session.errors import ConfigurationError, first_line

PROVIDER = "CUDAExecutionProvider"
"""ONNX Runtime's name for running on a GPU."""

TENSORRT_PROVIDER = "TensorrtExecutionProvider"
"""The same by way of TensorRT."""
_TENSORRT_LIBRARY = "libonnxruntime_providers_tensorrt.so"

_log = logging.getLogger(__name__)


def open_devices(device: str) -> list[Device]:
    """What a session's setting `device` means; `auto` is the CPU where there is no GPU to use.

    Raises:
        ConfigurationError: a GPU was asked for and cannot be used, or several that are not alike; says why.
    """
    if device == "cpu":
        return [HOST]
    if device == "auto" and (reason := unusable_for_sessions(0)):
        _log.info("Using the CPU: %s", reason)
        return [HOST]
    device_ids = [0] if device == "auto" else require_gpus(device)
    from inference_session.device.cuda import CudaDevice
    from inference_session.device.peers import check_equal

    check_equal(device_ids)
    try:
        return [CudaDevice(device_id) for device_id in device_ids]
    except ConfigurationError as error:
        if device != "auto":
            raise
        _log.warning("Using the CPU: %s", error)
        return [HOST]


def unusable_for_sessions(device_id: int) -> str | None:
    """Why a session cannot use a GPU, for which ONNX Runtime must support it too; None: it can."""
    return unusable(device_id) or unusable_network()


def unusable_network() -> str | None:
    """Why ONNX Runtime cannot run on a GPU; None: it may."""
    import onnxruntime

    preload = getattr(onnxruntime, "preload_dlls", None)
    if PROVIDER not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider (pip install onnxruntime-gpu instead of onnxruntime)"
    if preload is not None:  # finds libraries that pip has installed
        preload()
    return None


def unusable_tensorrt() -> str | None:
    """Why ONNX Runtime cannot use TensorRT; None: it may."""
    import onnxruntime

    if TENSORRT_PROVIDER not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no TensorRT provider (pip install onnxruntime-gpu instead of onnxruntime)"
    if not (Path(onnxruntime.__file__).parent / "capi" / _TENSORRT_LIBRARY).exists():
        return f"this ONNX Runtime comes without {_TENSORRT_LIBRARY}"
    try:
        importlib.import_module("tensorrt")  # loads the libraries that pip has installed
    except ImportError as error:
        if ctypes.util.find_library("nvinfer") is None:
            return f"TensorRT is not installed ({error}): pip install tensorrt"
    return None


def require_gpus(device: str) -> list[int]:
    """The numbers of `cuda:N`, `cuda:N,M` or `cuda:all`; ConfigurationError with the reason where one is not usable."""
    device_ids = _device_ids(device)
    for device_id in device_ids:
        if reason := unusable(device_id):
            raise ConfigurationError(f"device cannot be {device!r}: {reason}")
    return device_ids


def _device_ids(device: str) -> list[int]:
    """Of `cuda:all` those that there are, or 0 where none can be used."""
    numbers = device.removeprefix("cuda:")
    if numbers != "all":  # then nothing is asked of other GPUs: CUDA would take memory on them
        return [int(number) for number in numbers.split(",")]
    if unusable(0):
        return [0]
    from cupy.cuda import runtime

    return [*range(runtime.getDeviceCount())]


def unusable(device_id: int) -> str | None:
    """Why a GPU cannot be used; None: it can."""
    try:
        import cupy
        from cupy.cuda import nvrtc, runtime
    except ImportError as error:
        return f"CuPy is not installed ({error}): pip install 'hotrow[gpu]', or 'cupy-cuda12x' for CUDA 12"
    try:
        count: int = runtime.getDeviceCount()
        if device_id >= count:
            return f"this process sees {count} GPUs, numbered from cuda:0"
        with cupy.cuda.Device(device_id):
            runtime.memGetInfo()
    except runtime.CUDARuntimeError as error:
        return f"CUDA reports: {error}"
    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        return (
            f"CuPy does not find CUDA's compiler NVRTC ({first_line(error)}): install CUDA's toolkit, or pip install"
            " 'cupy-cuda13x[ctk]', or 'cupy-cuda12x[ctk]' for CUDA 12"
        )
    return None
