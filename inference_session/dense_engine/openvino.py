"""The dense engine of `dense_precision` `bfloat16`: OpenVINO runs layers, ONNX Runtime the rest.

OpenVINO computes matrix products in bfloat16 on processors that have instructions for it. It does not check shapes or
row numbers as ONNX Runtime does, so it gets only layers (rewrites/layers.py), and arrays whose shapes have been
checked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx.shape_inference import InferenceError

from inference_session.dense_engine.base import BoundRun, DenseEngine, PreparedRuns
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine, refused
from inference_session.dense_engine.rewrites.layers import Division, divide_layers
from inference_session.dense_engine.rewrites.parts import read_network
from inference_session.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelFormatError,
    SessionClosedError,
    UnsupportedModelError,
)
from inference_session.model_spec import NamedArrays

PACKAGE = "openvino"
"""Also the extra of hotrow that brings it."""
_CAPABILITY = "BF16"
_DIVISION_ERRORS = (EncodeError, InferenceError, ValueError, RuntimeError)
"""What ONNX raises of networks whose shapes contradict each other, or of 2 GiB and more."""


def unusable_bfloat16() -> str | None:
    """Why this process cannot compute in bfloat16; None: it can."""
    try:
        capabilities = openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    except ImportError as error:
        return f"OpenVINO is not installed ({error}): pip install 'hotrow[{PACKAGE}]'"
    except RuntimeError as error:
        return f"OpenVINO cannot use this processor: {_last_line(error)}"
    if _CAPABILITY not in capabilities:
        return "this processor has no instructions for bfloat16 (avx512_bf16 or amx_bf16)"
    return None


def read_division(network: NetworkFile) -> Division:
    """The layers of a network, and the rest of it.

    Raises:
        ModelFormatError: the file, or the one with its weights, is missing or damaged.
        UnsupportedModelError: the network cannot be divided.
    """
    model = read_network(network)
    try:
        return divide_layers(model)
    except _DIVISION_ERRORS as error:
        raise _not_in_bfloat16(network.path, error) from error


class OpenVinoEngine(DenseEngine):
    """One ONNX file whose layers are computed in bfloat16 on the processor."""

    def __init__(self, network: NetworkFile, *, num_threads: int) -> None:
        """Load the network.

        Raises:
            ConfigurationError: OpenVINO is not installed, or the processor has no bfloat16.
            ModelFormatError: the file cannot be read.
            UnsupportedModelError: OpenVINO cannot compute this network.
        """
        if reason := unusable_bfloat16():
            raise ConfigurationError(f"dense_precision cannot be 'bfloat16', use 'float32': {reason}")
        division = read_division(network)
        self.num_products, self.num_all_products = division.num_products, division.num_all_products
        self._first: OnnxEngine | None = None
        self._compiled: Any = None
        try:
            if division.first is not None:
                first = NetworkFile(network.path, division.first.SerializeToString())
                self._first = OnnxEngine(first, num_threads=num_threads)
            if division.layers is not None:
                self._compiled = _compile(division.layers, num_threads)
        except (EncodeError, ValueError, RuntimeError, ModelFormatError) as error:
            raise _not_in_bfloat16(network.path, error) from error
        self._row_shapes = list(division.row_shapes.items())
        layer_outputs = () if division.layers is None else division.layers.graph.output
        self._positions = {value.name: i for i, value in enumerate(layer_outputs)}
        """The position of each output of the layers."""
        self._idle: list[Any] = []
        """OpenVINO's requests that no thread uses."""
        self._closed = False
        self.input_names, self.output_names = frozenset(division.inputs), frozenset(division.outputs)

    def run(
        self,
        inputs: NamedArrays,
        outputs: Sequence[str],
        prepared: PreparedRuns | None = None,  # noqa: ARG002
    ) -> list[np.ndarray[Any, Any]]:
        if self._closed:
            raise SessionClosedError("the dense engine has been closed")
        if not outputs:
            return []
        known = dict(inputs)
        if self._first is not None:
            names = sorted(self._first.output_names)
            own = {name: inputs[name] for name in self._first.input_names}
            known.update(zip(names, self._first.run(own, names), strict=True))
        if not self._positions.keys().isdisjoint(outputs):
            known.update(self._run_layers(known, [name for name in outputs if name in self._positions]))
        return [known[name] for name in outputs]

    def bind(self, inputs: NamedArrays, outputs: Sequence[str]) -> BoundRun | None:
        """See DenseEngine: the inputs stay where they are. None where ONNX Runtime computes a part."""
        if self._closed or self._first is not None or not outputs:
            return None
        return OpenVinoBoundRun(self, inputs, outputs)

    def close(self) -> None:
        self._closed = True
        self._compiled = None
        self._idle.clear()
        if self._first is not None:
            self._first.close()

    def new_request(self) -> Any:
        """What OpenVINO runs the layers with, one batch at a time; SessionClosedError where the engine is closed."""
        compiled = self._compiled
        if compiled is None:
            raise SessionClosedError("the dense engine has been closed")
        return compiled.create_infer_request()

    def infer(self, request: Any, outputs: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        """Run the layers on the request's tensors; the caller owns the results."""
        try:
            request.infer()
        except RuntimeError as error:
            raise refused(error) from error
        return [request.get_output_tensor(self._positions[name]).data.copy() for name in outputs]

    def tensors(self, known: NamedArrays) -> list[Any]:
        """The inputs of the layers, float32 [samples, …], in place; OpenVINO does not check that they fit."""
        import openvino

        samples = known[self._row_shapes[0][0]].shape[:1]
        tensors = []
        for name, row_shape in self._row_shapes:
            array = known[name]
            if array.shape != (*samples, *row_shape) or array.dtype != np.float32:
                raise InvalidRequestError(
                    f"the network cannot compute these values: {name!r} is {array.dtype} {list(array.shape)}, expected"
                    f" float32 {[*samples, *row_shape]}"
                )
            tensors.append(openvino.Tensor(np.ascontiguousarray(array), shared_memory=True))
        return tensors

    def _run_layers(self, known: NamedArrays, outputs: Sequence[str]) -> NamedArrays:
        tensors = self.tensors(known)
        try:
            request = self._idle.pop()
        except IndexError:
            request = self.new_request()
        try:
            _set_inputs(request, tensors)
            return dict(zip(outputs, self.infer(request, outputs), strict=True))
        finally:
            self._idle.append(request)


class OpenVinoBoundRun(BoundRun):
    """A run of the layers over arrays that stay where they are."""

    def __init__(self, engine: OpenVinoEngine, inputs: NamedArrays, outputs: Sequence[str]) -> None:
        """`inputs`: float32 [samples, …] by name; errors of OpenVinoEngine.run."""
        self.inputs = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        self._engine, self._outputs = engine, outputs
        self._tensors = engine.tensors(self.inputs)  # OpenVINO does not keep the memory that it reads
        self._request = engine.new_request()
        _set_inputs(self._request, self._tensors)

    def run(self) -> list[np.ndarray[Any, Any]]:
        return self._engine.infer(self._request, self._outputs)


def _set_inputs(request: Any, tensors: Sequence[Any]) -> None:
    for i, tensor in enumerate(tensors):
        request.set_input_tensor(i, tensor)


@functools.cache
def openvino_core() -> Any:
    """OpenVINO's `Core`, made once in a process; ImportError where the package is not installed."""
    import openvino

    return openvino.Core()


def _compile(layers: onnx.ModelProto, num_threads: int) -> Any:
    """The layers as OpenVINO runs them: one batch at a time on this many threads, which are not pinned to cores."""
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    core = openvino_core()
    return core.compile_model(core.read_model(layers.SerializeToString()), "CPU", settings)


def _not_in_bfloat16(path: Path, error: Exception) -> UnsupportedModelError:
    reason = _last_line(error).removeprefix(f"{path}: ")
    return UnsupportedModelError(
        f"{path}: dense_precision 'bfloat16' does not suit this network, use 'float32': {reason}"
    )


def _last_line(error: Exception) -> str:
    """The last line of OpenVINO's message; the lines before it give source locations."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
