"""The dense engine on ONNX Runtime's CUDA provider, on the stream that the look-up runs on.

Small inputs and outputs stay in pinned host memory, where the network's kernels read and write them. Batches of the
sizes that a session warms up with are recorded as CUDA graphs, whose launch takes the host a fraction of the time that
launching each kernel does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from inference_session.dense_engine.onnx_engine import VALUE_ERRORS, OnnxEngine
from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.gpu_context import GpuContext

PROVIDER = "CUDAExecutionProvider"
_MAX_GRAPHS, _MAX_BINDINGS = 16, 256
_NO_GRAPH = "-1"
_MAX_IN_PLACE_BYTES = 1 << 16
"""Above this it is faster to copy an array to the device and back than to reach over the bus for each element."""
_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
"""Of outputs that can be written to pinned memory."""


class CudaEngine(OnnxEngine):
    """One ONNX file on a GPU. Inputs that CuPy has on the device are read there; outputs come back to the host."""

    def __init__(self, path: Path, *, num_threads: int, gpu: GpuContext, use_tf32: bool) -> None:
        """`use_tf32`: let matrix products round their inputs to 10 bits, for relative errors of about 1e-3.

        Raises:
            ConfigurationError: ONNX Runtime has no CUDA provider, or could not start it here.
        """
        if reason := unusable():
            raise ConfigurationError(f"device cannot be 'cuda:{gpu.device_id}': {reason}")
        self._gpu = gpu
        settings = {
            "device_id": str(gpu.device_id),
            "user_compute_stream": str(gpu.stream.ptr),
            "use_tf32": str(int(use_tf32)),
            "arena_extend_strategy": "kSameAsRequested",
        }
        self._may_record = True
        try:
            self._open(path, num_threads, {**settings, "enable_cuda_graph": "1"})
        except ModelFormatError:  # some node runs on the processor, which no graph can hold
            self._may_record = False
            self._open(path, num_threads, settings)
        if self.provider != PROVIDER:
            raise ConfigurationError(
                f"device cannot be 'cuda:{gpu.device_id}': ONNX Runtime gave {self.provider} instead of {PROVIDER}:"
                " it did not find the CUDA and cuDNN libraries it was built for, or they do not fit the driver"
            )
        self._declared = {output.name: (output.shape, output.type) for output in self._session.get_outputs()}
        self._input_shapes = {each.name: each.shape for each in self._session.get_inputs()}
        self._trusted: set[str] = set()
        """Outputs whose shapes were seen to be what the file declares."""
        self._bindings: dict[Hashable, tuple[Any, Any]] = {}
        """By names, shapes and addresses of inputs and outputs: how these are bound, and the options to run with."""
        self._num_graphs = 0
        self._recorder: int | None = threading.get_ident()
        """The thread that may record graphs, which are known in it alone; None: no longer."""
        self._plain = _run_options(_NO_GRAPH)

    def end_warm_up(self) -> None:
        """See DenseEngine: recording holds up the whole device, and would hold up requests."""
        self._may_record = False

    def _open(self, path: Path, num_threads: int, settings: dict[str, str]) -> None:
        super().__init__(path, num_threads=num_threads, providers=[(PROVIDER, settings), "CPUExecutionProvider"])

    def _compute(self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        with self._gpu.request():
            return self._compute_here(session, inputs, outputs)

    def _compute_here(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str]
    ) -> list[np.ndarray[Any, Any]]:
        placed = {name: self._place(array) for name, array in inputs.items()}
        shapes = self._predicted_shapes(placed, outputs)
        if not self._trusted.issuperset(outputs) or any(map(_is_large, shapes.values())):
            return self._run_unbound(session, placed, outputs, shapes)
        results = {name: self._gpu.pinned(shapes[name], _TYPES[self._declared[name][1]]) for name in outputs}
        case = (*[(name, array.shape, _address(array)) for name, array in (*placed.items(), *results.items())],)
        binding, options = self._bindings.get(case) or self._bind(session, case, placed, results)
        try:
            self._run_bound(session, binding, options)
        except VALUE_ERRORS:  # shapes other than foreseen, or a request that fails there as well
            return self._run_unbound(session, placed, outputs, shapes)
        self._gpu.wait()
        return [array.copy() for array in results.values()]

    def _place(self, array: Any) -> Any:
        """The array where the network can read it; as it is, if it holds something else than numbers."""
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
            return array
        staged = self._gpu.stage(array)
        if staged.nbytes <= _MAX_IN_PLACE_BYTES:
            return staged
        on_device = self._gpu.empty(array.shape, array.dtype)
        on_device.set(staged, stream=self._gpu.stream)
        return on_device

    def _bind(
        self, session: Any, case: Hashable, placed: Mapping[str, Any], results: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """The binding of arrays in these places, and how to run it; kept, but for what only this run can know."""
        binding = session.io_binding()
        for name, array in placed.items():
            self._bind_input(binding, name, array)
        for name, array in results.items():
            binding.bind_output(name, "cuda", self._gpu.device_id, array.dtype.type, array.shape, _address(array))
        numbers_only = all(array.dtype.kind in "fiub" for array in placed.values())
        options = self._plain
        if numbers_only and self._may_record and threading.get_ident() == self._recorder:
            self._num_graphs += 1
            options = _run_options(str(self._num_graphs))
            self._may_record = self._num_graphs < _MAX_GRAPHS
        if numbers_only:
            if len(self._bindings) >= _MAX_BINDINGS:
                self._bindings = {known: kept for known, kept in self._bindings.items() if kept[1] is not self._plain}
            self._bindings[case] = binding, options
        return binding, options

    def _bind_input(self, binding: Any, name: str, array: Any) -> None:
        if array.dtype.kind in "fiub":
            address = _address(array)
            binding.bind_input(name, "cuda", self._gpu.device_id, array.dtype.type, array.shape, address)
        else:
            binding.bind_cpu_input(name, np.ascontiguousarray(array))

    def _run_bound(self, session: Any, binding: Any, options: Any) -> None:
        if options is not self._plain and threading.get_ident() != self._recorder:
            options = self._plain
        try:
            session.run_with_iobinding(binding, options)
        except VALUE_ERRORS:
            if options is self._plain:
                raise
            # Not everything that a network does can be recorded.
            self._may_record, self._recorder = False, None
            self._gpu.end_recording()
            session.run_with_iobinding(binding, self._plain)

    def _run_unbound(
        self, session: Any, placed: Mapping[str, Any], outputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> list[np.ndarray[Any, Any]]:
        """Run with outputs that ONNX Runtime allocates, and learn whether their shapes were the predicted ones."""
        binding = session.io_binding()
        for name, array in placed.items():
            self._bind_input(binding, name, array)
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding, self._plain)
        results: list[np.ndarray[Any, Any]] = binding.copy_outputs_to_cpu()
        for name, array in zip(outputs, results, strict=True):
            if array.shape == shapes.get(name) and array.ndim and len(array) > 1:
                self._trusted.add(name)
        return results

    def _predicted_shapes(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Of the outputs whose open dimensions are the inputs'."""
        sizes: dict[Any, int | None] = {}
        for name, array in inputs.items():
            for symbol, size in zip(self._input_shapes[name], array.shape, strict=False):
                sizes[symbol] = size if sizes.get(symbol, size) == size else None
        shapes: dict[str, Any] = {}
        for name in outputs:
            declared, kind = self._declared[name]
            shape = tuple(sizes.get(size) if isinstance(size, str) else size for size in declared)
            if kind in _TYPES and all(isinstance(size, int) for size in shape):
                shapes[name] = shape
        return shapes


def unusable() -> str | None:
    """Why ONNX Runtime cannot run on a GPU; None: it may."""
    preload = getattr(onnxruntime, "preload_dlls", None)
    if PROVIDER not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu in place of onnxruntime"
    if preload is not None:  # finds libraries that pip has installed
        preload()
    return None


def _run_options(graph: str) -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def _address(array: Any) -> int:
    """The address by which the device knows it."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.data.ptr)


def _is_large(shape: tuple[int, ...]) -> bool:
    return 8 * math.prod(shape) > _MAX_IN_PLACE_BYTES
