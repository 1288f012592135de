"""The dense engine on ONNX Runtime's CPU provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from inference_session.dense_engine.base import DenseEngine
from inference_session.errors import InvalidRequestError, ModelFormatError, SessionClosedError

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


class OnnxEngine(DenseEngine):
    """One ONNX file on the CPU, with a thread pool of its own that does not spin."""

    def __init__(
        self,
        path: Path,
        *,
        content: bytes | None = None,
        num_threads: int,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
    ) -> None:
        """`content`: what to take for the file's, if not what is in it.

        Raises:
            ModelFormatError: ONNX Runtime cannot load it.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is raised: clients cannot flood the log by malformed requests
        # Spinning threads would take the cores that look-ups, Triton and its clients need.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            # Its fallback prints to stdout and tries the same provider again.
            self._session: Any = onnxruntime.InferenceSession(
                path if content is None else content, options, providers=list(providers), enable_fallback=0
            )
            self.input_names = frozenset(tensor.name for tensor in self._session.get_inputs())
            self.output_names = frozenset(tensor.name for tensor in self._session.get_outputs())
        except _LOAD_ERRORS as error:
            raise ModelFormatError(f"{path}: ONNX Runtime cannot load it: {_first_line(error)}") from error
        self.provider: str = self._session.get_providers()[0]

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], prepared: Any = None
    ) -> list[np.ndarray[Any, Any]]:
        session = self.opened()
        if not outputs:  # ONNX Runtime takes this for all of them
            return []
        try:
            return self._compute(session, inputs, outputs, prepared)
        except VALUE_ERRORS as error:
            raise refused(error) from error

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
        prepared: Any,  # noqa: ARG002
    ) -> list[np.ndarray[Any, Any]]:
        # Contiguous arrays are bound as they are: ONNX Runtime copies nothing on the CPU.
        results: list[np.ndarray[Any, Any]] = session.run(outputs, inputs)
        return results


def refused(error: Exception) -> InvalidRequestError:
    """What to say where ONNX Runtime says that values do not suit the network."""
    return InvalidRequestError(f"the network cannot compute these values: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What an error says first; some of ONNX Runtime's say nothing but their name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
