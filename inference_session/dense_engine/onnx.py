"""The dense engine on ONNX Runtime's CPU provider."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from inference_session.dense_engine.base import BoundRun, DenseEngine, PreparedRuns
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.errors import InvalidRequestError, ModelFormatError, SessionClosedError, first_line
from inference_session.model_spec import NamedArrays
from inference_session.platform.file_names import path_for_library

# What ONNX Runtime raises when a file cannot become a network …
_LOAD_ERRORS = (
    ort_errors.InvalidProtobuf,
    ort_errors.InvalidGraph,
    ort_errors.InvalidArgument,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.Fail,
    ort_errors.RuntimeException,
    UnicodeDecodeError,  # a name in it is no UTF-8, and is in its message, or among the inputs
)
# … and when values do not suit it. A shape clash inside the graph is a RuntimeException.
VALUE_ERRORS = (ort_errors.InvalidArgument, ort_errors.Fail, ort_errors.RuntimeException)

_OTHER_NAMES = {"float": "float32", "double": "float64", "string": "object"}
"""Types that ONNX Runtime and NumPy call differently."""


class OnnxEngine(DenseEngine):
    """One ONNX file on the CPU, with its own thread pool, which does not spin."""

    def __init__(
        self, network: NetworkFile, *, num_threads: int, providers: Sequence[Any] = ("CPUExecutionProvider",)
    ) -> None:
        """ModelFormatError: ONNX Runtime cannot load it."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is raised: clients cannot flood the log by malformed requests
        # Spinning threads would take the cores that look-ups, Triton and its clients need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            # ONNX Runtime's fallback prints to stdout and tries the same provider again.
            self._session: Any = onnxruntime.InferenceSession(
                path_for_library(network.path) if network.made is None else network.made,
                options,
                providers=list(providers),
                enable_fallback=0,
                disabled_optimizers=network.harmful_optimizers(),
            )
            self.input_types = {tensor.name: _dtype_name(tensor.type) for tensor in self._session.get_inputs()}
            """As NumPy calls them."""
            self.output_types = {tensor.name: _dtype_name(tensor.type) for tensor in self._session.get_outputs()}
            self.input_names, self.output_names = frozenset(self.input_types), frozenset(self.output_types)
        except _LOAD_ERRORS as error:
            raise ModelFormatError(f"{network.path}: ONNX Runtime cannot load it: {first_line(error)}") from error
        self.provider: str = self._session.get_providers()[0]

    def run(
        self, inputs: NamedArrays, outputs: Sequence[str], prepared: PreparedRuns | None = None
    ) -> list[np.ndarray[Any, Any]]:
        session = self.opened()
        if not outputs:  # ONNX Runtime takes this for all of them
            return []
        try:
            return self._compute(session, inputs, outputs, prepared)
        except VALUE_ERRORS as error:
            raise refused(error) from error

    def bind(self, inputs: NamedArrays, outputs: Sequence[str]) -> BoundRun | None:
        """See DenseEngine: the inputs stay where they are."""
        session = self.opened()
        try:
            return OnnxBoundRun(session, inputs, outputs) if outputs else None
        except (RuntimeError, ValueError, TypeError, *VALUE_ERRORS):  # a type that cannot be bound
            return None

    def opened(self) -> Any:
        """ONNX Runtime's session; SessionClosedError where it has been closed."""
        if self._session is None:
            raise SessionClosedError("the dense engine has been closed")
        return self._session

    def close(self) -> None:
        self._session = None

    def _compute(
        self,
        session: Any,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        prepared: Any,  # noqa: ARG002  what the engine's own `prepare` has made
    ) -> list[np.ndarray[Any, Any]]:
        # Contiguous arrays are bound as they are: ONNX Runtime copies nothing on the CPU.
        results: list[np.ndarray[Any, Any]] = session.run(outputs, inputs)
        return results


def _dtype_name(kind: str) -> str:
    name = kind.removeprefix("tensor(").removesuffix(")")
    return _OTHER_NAMES.get(name, name)


class OnnxBoundRun(BoundRun):
    """A run of the network on the processor over arrays that stay where they are.

    The first run tells the shapes of the outputs. Further ones write them to memory that was bound for them as well
    (`results`), unless the network is seen to give its outputs other shapes, or one of them is an input.
    """

    def __init__(self, session: Any, inputs: NamedArrays, outputs: Sequence[str]) -> None:
        self.inputs = inputs
        self._outputs = outputs
        # ONNX Runtime leaves memory that is bound for an output as it is where the output is an input.
        self._may_bind_results = inputs.keys().isdisjoint(outputs)
        self._binding = session.io_binding()
        for name, array in inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._bind_outputs()
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._run = bound_run(session, self._binding, options)

    def run(self) -> list[np.ndarray[Any, Any]]:
        try:
            self._run()
        except (RuntimeError, *VALUE_ERRORS) as error:
            if self.results is None:
                raise refused(error) from error
            return self._run_unbound(self.results)
        if self.results is None:
            return self._results_of_first_run()
        return self.results

    def _run_unbound(self, results: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Run again because outputs may have new shapes; from then on ONNX Runtime allocates them.

        But if it is the values that the network refuses, they stay bound to `results`.
        """
        self.results = None
        self._bind_outputs()
        try:
            self._run()
        except (RuntimeError, *VALUE_ERRORS) as error:
            self._bind_results(results)
            raise refused(error) from error
        self.result_bytes, self._may_bind_results = 0, False
        return self._results_of_first_run()

    def _bind_outputs(self) -> None:
        self._binding.clear_binding_outputs()
        for name in self._outputs:
            self._binding.bind_output(name, "cpu")

    def _bind_results(self, results: list[np.ndarray[Any, Any]]) -> None:
        self._binding.clear_binding_outputs()
        for name, array in zip(self._outputs, results, strict=True):
            self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self.results = results

    def _results_of_first_run(self) -> list[np.ndarray[Any, Any]]:
        # Arrays of ONNX Runtime's may lie in the memory of the inputs, which the next run overwrites.
        found = [array.copy() for array in bound_results(self._binding)]
        if not self._may_bind_results or any(array.dtype == object for array in found):
            self._bind_outputs()  # else the next run would write over arrays that a caller still holds
            return found
        self._bind_results([np.empty_like(array) for array in found])
        self.result_bytes = sum(array.nbytes for array in found)
        return found


def bound_run(session: Any, binding: Any, options: Any) -> Callable[[], None]:
    """A function that runs the network once on the arrays that are bound."""
    # The public method of ONNX Runtime 1.32 reads the options in each run, which takes ten times as long as a small
    # network. The method that it calls is private: releases without it get the public one.
    try:
        run, bound = session._sess.run_with_iobinding, binding._iobinding
    except AttributeError:
        run, bound = session.run_with_iobinding, binding
    return functools.partial(run, bound, options)


def bound_results(binding: Any) -> list[np.ndarray[Any, Any]]:
    """The outputs of a run, which are bound to host memory. Those of numbers may be ONNX Runtime's own memory."""
    # ONNX Runtime's `copy_outputs_to_cpu` ends the process if an output holds strings.
    return [value.numpy() for value in binding.get_outputs()]


def refused(error: Exception) -> InvalidRequestError:
    """The message for values that ONNX Runtime rejects."""
    return InvalidRequestError(f"the network cannot compute these values: {first_line(error)}")
