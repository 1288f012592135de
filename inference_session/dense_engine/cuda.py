"""The dense engine on ONNX Runtime's CUDA provider, on the stream that the look-up runs on.

Small inputs and outputs stay in pinned host memory, where the network's kernels read and write them. Batches of the
sizes that a session warms up with are recorded as CUDA graphs, whose launch takes the host a fraction of the time that
launching each kernel takes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import cupy
import numpy as np
import onnxruntime
from cupy.cuda import runtime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from inference_session.dense_engine.base import BoundRun
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import VALUE_ERRORS, OnnxEngine, bound_results, bound_run, refused
from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import check_room, memory_ran_out
from inference_session.device.discovery import PROVIDER, unusable_network
from inference_session.errors import ConfigurationError, ModelFormatError, as_thrown
from inference_session.platform.bounded_memory import BoundedMemory

_MAX_GRAPHS = 16
_PLACES_PER_SHAPE = 8
"""Places that are bound for inputs of the same shapes: requests at the same time use different ones."""
_MAX_FIXED = 1024
_NO_GRAPH = "-1"
_NOTHING_HELD = contextlib.nullcontext()
_MAX_IN_PLACE_BYTES = 1 << 16
"""Above this it is faster to copy an array to the device and back than to reach over the bus for each element."""
_MAX_RESULT_BYTES = 1 << 18
"""Above this outputs are copied as well, though each of their elements is written once."""
_LEAST_BYTES = 256 << 20
"""With less memory free, ONNX Runtime may fail while it starts."""
_MAX_NODE_ARRAYS = 32
"""Inputs or outputs of a node in a network that is recorded. The addresses of more are no parameters of a kernel: ONNX
Runtime copies them from host memory in each run, which it frees at the end of the run.
"""
_NO_MEMORY = re.compile(r"(?:CUDA failure 2|CUBLAS failure 3): [^;]*|Failed to allocate memory[^;]*")
"""What ONNX Runtime says of a device that has too little memory for a network: numbers of the libraries, or words."""
_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(int64)": np.int64}
"""Types of outputs that can be written to pinned memory."""
_GRAPH_TOLERANCE = 1e-3
"""The largest difference of a graph from a plain run, relative to the largest value or 1; wrong graphs differ more."""
_log = logging.getLogger(__name__)


class _Binding(NamedTuple):
    """Arrays in certain places, bound to the network."""

    binding: Any
    options: Any
    """The run options, which name the graph."""
    inputs: Mapping[str, Any]
    results: Mapping[str, Any]


class _PlacedInput(NamedTuple):
    """An input where the network can read it."""

    array: Any
    staged: NDArray[Any] | None
    """The host memory that holds it; None: it was on the device already."""

    @property
    def is_copied(self) -> bool:
        """Whether the network reads a copy of what the host has put there."""
        return self.staged is not None and self.array is not self.staged


_Bindings: TypeAlias = "BoundedMemory[Hashable, _Binding]"
"""By names, shapes and addresses of inputs and outputs."""


class CudaBoundRun(BoundRun):
    """A run of the network over certain places in pinned and device memory."""

    def __init__(self, engine: CudaEngine, bound: _Binding, inputs: Mapping[str, _PlacedInput]) -> None:
        self._engine = engine
        self._bound = bound
        self._uploads = [engine.upload_of(placed) for placed in inputs.values() if placed.is_copied]
        self.inputs = {name: placed.staged for name, placed in inputs.items() if placed.staged is not None}

    def run(self) -> list[np.ndarray[Any, Any]]:
        return self._engine.run_again(self._bound, self._uploads)


class CudaEngine(OnnxEngine):
    """One ONNX file on a GPU. Inputs that CuPy has on the device are read there; outputs come back to the host."""

    expected_provider = PROVIDER
    """ONNX Runtime's name for what computes the network."""

    def __init__(self, network: NetworkFile, *, num_threads: int, gpu: CudaDevice, use_tf32: bool) -> None:
        """`use_tf32`: let matrix products round their inputs to 10 bits, for relative errors of about 1e-3.

        Raises:
            ConfigurationError: ONNX Runtime has no CUDA provider, or could not start it here; or the device has too
                little memory.
        """
        if reason := unusable_network():
            raise ConfigurationError(f"device cannot be 'cuda:{gpu.device_id}': {reason}")
        settings = {
            **device_option(gpu),
            "user_compute_stream": str(gpu.stream.ptr),
            "use_tf32": str(int(use_tf32)),
            "arena_extend_strategy": "kSameAsRequested",
        }
        self._may_record = True
        with _memory_checked(gpu, _size(network)):
            self._open_on_gpu(network, num_threads, settings)
        self._path = network.path
        self._gpu = gpu
        if self.provider != self.expected_provider:
            raise ConfigurationError(
                f"device cannot be 'cuda:{gpu.device_id}': ONNX Runtime gave {self.provider} instead of"
                f" {self.expected_provider}: the CUDA and cuDNN libraries that it was built for are missing or do not"
                " match the driver"
            )
        self._declared = {output.name: (output.shape, output.type) for output in self._session.get_outputs()}
        self._input_shapes = {each.name: each.shape for each in self._session.get_inputs()}
        self.narrow_inputs = frozenset(
            each.name for each in self._session.get_inputs() if each.type == "tensor(float16)"
        )
        self._can_bind = all(map(_is_numeric, (*self._session.get_inputs(), *self._session.get_outputs())))
        self._trusted: set[str] = set()
        """Outputs whose shapes were seen to be what the file declares. None of them is an input, which ONNX Runtime
        would not copy to the memory that is bound for it.
        """
        self._graphs: list[_Binding] = []
        """What has been recorded while the session warms up."""
        self._fixed: _Bindings = BoundedMemory(_MAX_FIXED)
        """The bindings of bound runs: those of the same places share one, and its graph."""
        self._recorder: threading.Thread | None = threading.current_thread()
        """The thread that may record graphs, which are known in it alone; None: no longer."""
        self._warms_up = True
        """Whether a run may record: those after `end_warm_up` only repeat what has been recorded."""
        self._plain = _run_options(_NO_GRAPH)

    def end_warm_up(self) -> None:
        """See DenseEngine: recording holds up the whole device, and would hold up requests."""
        self._may_record = False
        recorded, self._graphs = self._graphs, []
        if recorded and self._recorder is threading.current_thread():
            with self._gpu.request():
                self._check_graphs(recorded)
        self._warms_up = False
        self.replays = bool(recorded) and self._recorder is not None

    def prepare(self) -> _Bindings:
        """See DenseEngine: bindings of arrays in certain places."""
        return BoundedMemory(_PLACES_PER_SHAPE)

    def may_bind(self, outputs: Sequence[str]) -> bool:
        """See DenseEngine: only after a run has confirmed the shapes that the file declares."""
        return bool(outputs) and self._can_bind and self._trusted.issuperset(outputs)

    def bind(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> CudaBoundRun | None:
        """See DenseEngine. None also where outputs are too large for it."""
        placed = {name: self._place(array) for name, array in inputs.items()}
        arrays = {name: each.array for name, each in placed.items()}
        bound = self._bound(self._session, arrays, outputs, self._predicted_shapes(arrays, outputs), self._fixed)
        return None if bound is None else CudaBoundRun(self, bound, placed)

    def run_again(self, bound: _Binding, uploads: Sequence[Callable[[], object]]) -> list[np.ndarray[Any, Any]]:
        """See BoundRun.run. `uploads`: start the copies of inputs to the device."""
        session = self.opened()
        for upload in uploads:
            upload()
        try:
            return self._answer(session, bound)
        except VALUE_ERRORS:  # as in `_compute_here`
            outputs = list(bound.results)
            shapes = {name: array.shape for name, array in bound.results.items()}
            try:
                return self._run_unbound(session, bound.inputs, outputs, shapes)
            except VALUE_ERRORS as error:
                raise refused(error) from error

    def _open_on_gpu(self, network: NetworkFile, num_threads: int, settings: dict[str, str]) -> None:
        """Open the network, with CUDA graphs where all of it can run on the GPU."""
        if _has_large_node(network):
            self._may_record = False
            self._open(network, num_threads, settings)
            _log.info(
                "%s: CUDA graphs are off: a node has more than %d inputs or outputs", network.path, _MAX_NODE_ARRAYS
            )
            return
        try:
            self._open(network, num_threads, {**settings, "enable_cuda_graph": "1"})
        except ModelFormatError as error:  # some node runs on the processor, which no graph can hold
            self._may_record = False
            self._open(network, num_threads, settings)
            _log.info("%s: CUDA graphs are off: %s", network.path, error)

    def _open(self, network: NetworkFile, num_threads: int, settings: dict[str, str]) -> None:
        providers = [(PROVIDER, settings), "CPUExecutionProvider"]
        super().__init__(network, num_threads=num_threads, providers=providers)

    def _compute(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str], prepared: _Bindings | None
    ) -> list[np.ndarray[Any, Any]]:
        with self._gpu.request():
            return self._compute_here(session, inputs, outputs, prepared)

    def _compute_here(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str], bindings: _Bindings | None
    ) -> list[np.ndarray[Any, Any]]:
        if not self._can_bind:
            on_host = {name: array if isinstance(array, np.ndarray) else array.get() for name, array in inputs.items()}
            answer: list[np.ndarray[Any, Any]] = session.run(outputs, on_host, self._plain)
            return answer
        placed = {name: self._place(array).array for name, array in inputs.items()}
        shapes = self._predicted_shapes(placed, outputs)
        bound = self._bound(session, placed, outputs, shapes, bindings)
        if bound is None:
            return self._run_unbound(session, placed, outputs, shapes)
        try:
            return self._answer(session, bound)
        except VALUE_ERRORS:  # shapes other than foreseen, or a request that fails there as well
            return self._run_unbound(session, placed, outputs, shapes)

    def _bound(
        self,
        session: Any,
        placed: Mapping[str, Any],
        outputs: Sequence[str],
        shapes: Mapping[str, tuple[int, ...]],
        bindings: _Bindings | None,
    ) -> _Binding | None:
        """The binding of inputs and results in their places; None where their shapes are not certain.

        `bindings`: those made before; None: this one is used once.
        """
        if not (self._trusted & shapes.keys()).issuperset(outputs) or any(map(_is_large, shapes.values())):
            return None
        results = {name: self._gpu.pinned(shapes[name], _TYPES[self._declared[name][1]]) for name in outputs}
        case = (*[(name, array.shape, _address(array)) for name, array in (*placed.items(), *results.items())],)
        if bindings is None:
            return self._bind(session, placed, results, self._plain)
        bound = bindings.get(case)
        if bound is None:
            bound = self._bind_again(session, placed, results)
            bindings.put(case, bound)
        return bound

    def _answer(self, session: Any, bound: _Binding) -> list[np.ndarray[Any, Any]]:
        self._run_bound(session, bound)
        self._gpu.wait()
        return [array.copy() for array in bound.results.values()]

    def _place(self, array: Any) -> _PlacedInput:
        if not isinstance(array, np.ndarray):
            return _PlacedInput(array, None)
        staged = self._gpu.stage(array)
        if staged.nbytes <= _MAX_IN_PLACE_BYTES:
            return _PlacedInput(staged, staged)
        placed = _PlacedInput(self._gpu.empty(array.shape, array.dtype), staged)
        self.upload_of(placed)()
        return placed

    def upload_of(self, placed: _PlacedInput) -> Callable[[], object]:
        """Starts a copy to the device each time it is called, a third of the time that an array of CuPy's takes."""
        places = placed.array.data.ptr, _address(placed.staged)
        kind, stream = runtime.memcpyHostToDevice, self._gpu.stream.ptr
        return partial(runtime.memcpyAsync, *places, placed.array.nbytes, kind, stream)

    def _bind_again(self, session: Any, placed: Mapping[str, Any], results: Mapping[str, Any]) -> _Binding:
        """As `_bind`, for a binding that is used often: it gets its own graph while the session warms up."""
        if not self._may_record or threading.current_thread() is not self._recorder:
            return self._bind(session, placed, results, self._plain)
        options = _run_options(str(len(self._graphs) + 1))
        bound = self._bind(session, placed, results, options)
        self._graphs.append(bound)
        self._may_record = len(self._graphs) < _MAX_GRAPHS
        return bound

    def _bind(self, session: Any, placed: Mapping[str, Any], results: Mapping[str, Any], options: Any) -> _Binding:
        """The binding of arrays in these places."""
        binding = session.io_binding()
        for name, array in placed.items():
            self._bind_input(binding, name, array)
        for name, array in results.items():
            binding.bind_output(name, "cuda", self._gpu.device_id, array.dtype.type, array.shape, _address(array))
        return _Binding(binding, options, placed, results)

    def _bind_input(self, binding: Any, name: str, array: Any) -> None:
        address = _address(array)
        binding.bind_input(name, "cuda", self._gpu.device_id, array.dtype.type, array.shape, address)

    def _run_bound(self, session: Any, bound: _Binding) -> None:
        if bound.options is self._plain or threading.current_thread() is not self._recorder:
            _run(session, bound.binding, self._plain)
            return
        try:
            with self._gpu.recording() if self._warms_up else _NOTHING_HELD:
                _run(session, bound.binding, bound.options)
        except VALUE_ERRORS as error:
            self._gpu.end_recording()
            _run(session, bound.binding, self._plain)  # if this fails too, the graph was not the cause
            self._give_up_graphs(str(error))  # not everything that a network does can be recorded

    def _give_up_graphs(self, reason: str) -> None:
        self._may_record, self._recorder = False, None
        _log.warning("%s: CUDA graphs are off from now on: %s", self._path, reason)

    def _check_graphs(self, recorded: Sequence[_Binding]) -> None:
        """Give up graphs unless all of them compute what plain runs do: graphs of a network that reads its own host
        memory may differ, once another run has written to that memory.
        """
        try:
            expected = [self._results_of(bound._replace(options=self._plain)) for bound in recorded]
            found = [self._results_of(bound) for bound in recorded]
        except VALUE_ERRORS as error:
            self._give_up_graphs(f"the check failed: {error}")
            return
        differing = sum(not all(map(_are_close, *pair)) for pair in zip(expected, found, strict=True))
        if differing:
            self._give_up_graphs(
                f"{differing} of {len(recorded)} outputs differ from those computed without CUDA graphs"
            )

    def _results_of(self, bound: _Binding) -> list[np.ndarray[Any, Any]]:
        """The results of a run on test numbers: fractions, and zeros for whole numbers, which may be positions."""
        generator = np.random.default_rng(0)
        for array in bound.inputs.values():
            fractions = array.dtype.kind == "f"
            values = generator.random(array.shape) if fractions else np.zeros(array.shape)
            _fill(array, values.astype(array.dtype))
        for array in bound.results.values():
            array[...] = 0
        return self._answer(self._session, bound)

    def _run_unbound(
        self, session: Any, placed: Mapping[str, Any], outputs: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> list[np.ndarray[Any, Any]]:
        """Run with outputs that ONNX Runtime allocates, and learn whether their shapes were the predicted ones."""
        binding = session.io_binding()
        for name, array in placed.items():
            self._bind_input(binding, name, array)
        for name in outputs:
            binding.bind_output(name, "cpu")
        _run(session, binding, self._plain)
        results = bound_results(binding)
        for name, array in zip(outputs, results, strict=True):
            is_foreseen = array.shape == shapes.get(name) and array.ndim and len(array) > 1
            if is_foreseen and name not in self.input_names:
                self._trusted.add(name)
        return results

    def _predicted_shapes(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Shapes of the outputs whose open dimensions are the inputs'."""
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


def _size(network: NetworkFile) -> int:
    """Bytes of the network, without weights in other files; 0 where there is no file: ONNX Runtime says so."""
    if network.made is not None:
        return len(network.made)
    return network.path.stat().st_size if network.path.exists() else 0


def _has_large_node(network: NetworkFile) -> bool:
    """Whether a node of the network has more inputs or outputs than a network that is recorded may have."""
    # Imported where needed: it takes a while to load.
    import onnx
    from google.protobuf.message import DecodeError

    from inference_session.dense_engine.rewrites.parts import most_arrays

    try:
        model = onnx.load_model_from_string(network.content())
    except (OSError, DecodeError):  # ONNX Runtime says why
        return False
    return most_arrays(model.graph) > _MAX_NODE_ARRAYS


def device_option(gpu: CudaDevice) -> dict[str, str]:
    """The option of ONNX Runtime's providers that names the device; none for the first one, which is the default.

    Where it is named, ONNX Runtime prints a warning from 1.26 on: that no plugin has the device.
    """
    return {"device_id": str(gpu.device_id)} if gpu.device_id else {}


@contextlib.contextmanager
def _memory_checked(gpu: CudaDevice, num_bytes: int) -> Iterator[None]:
    """ConfigurationError where the device has too little memory to start ONNX Runtime, or for a network of this size.

    It is checked before ONNX Runtime starts: see `_LEAST_BYTES`.
    """
    check_room(_LEAST_BYTES + num_bytes, gpu.device_id)
    try:
        yield
    except ModelFormatError as error:
        if (found := _NO_MEMORY.search(str(error))) is None:
            raise
        with cupy.cuda.Device(gpu.device_id):
            raise memory_ran_out(
                gpu.device_id, found[0].strip(), "free some memory or use another device"
            ) from as_thrown(error)


def _run(session: Any, binding: Any, options: Any) -> None:
    """Run bound arrays; what goes wrong is a VALUE_ERROR."""
    try:
        bound_run(session, binding, options)()
    except RuntimeError as error:  # all that ONNX Runtime raises here
        raise ort_errors.RuntimeException(str(error).removeprefix("Error in execution: ")) from error


def _run_options(graph: str) -> Any:
    """Options with which a run waits for the device. After a run that does not, ONNX Runtime keeps host memory of the
    nodes until it frees the network, on a stream that may be gone by then: bindings keep the network.
    """
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def _address(array: Any) -> int:
    """Its address on the device."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _is_large(shape: tuple[int, ...]) -> bool:
    return 8 * math.prod(shape) > _MAX_RESULT_BYTES


def _is_numeric(declared: Any) -> bool:
    """Whether an input or output can be bound: tensors of strings, sequences and maps cannot."""
    kind: str = declared.type
    return kind.startswith("tensor(") and kind != "tensor(string)"


def _fill(array: Any, values: np.ndarray[Any, Any]) -> None:
    """Write into an array on the host or the device."""
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(values)


def _are_close(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> bool:
    if expected.dtype.kind != "f" or not expected.size:
        return np.array_equal(expected, found)
    largest = np.nanmax(np.abs(expected), initial=1.0, where=np.isfinite(expected))
    return np.allclose(expected, found, rtol=0, atol=_GRAPH_TOLERANCE * largest, equal_nan=True)
