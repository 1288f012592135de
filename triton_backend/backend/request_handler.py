"""Converts Triton's requests to arrays and answers to Triton's responses; errors become error responses."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import cache
from itertools import repeat
from typing import Any, TypeAlias

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.errors import HotrowError, InvalidRequestError, UnavailableError
from inference_session.execution.phases import OnPhase, ignore_phase
from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import Request
from inference_session.requests.outputs import Answer, JoinedAnswer
from inference_session.session import InferenceSession
from inference_session.versions import VersionManager
from triton_backend.backend.errors import triton_error
from triton_backend.backend.output_tensors import ThreadTensors
from triton_backend.backend.request_reader import RequestReader
from triton_backend.backend.tensors import read_array, write_tensor
from triton_backend.backend.tracing import RequestTracer
from triton_backend.client.probe import is_probe

TritonRequest: TypeAlias = Any
"""`pb_utils.InferenceRequest`, which exists inside the server's stub only."""
TritonResponse: TypeAlias = Any
"""`pb_utils.InferenceResponse`."""


class RequestHandler:
    """Answers lists of requests, each by one content of the version; never raises.

    Args:
        max_samples: a request with more rows than this is refused. 0: Triton itself checks it.
        device_id: the GPU that Triton assigned to the instance; sent to clients of HugeCTR.
        tracing: makes spans of the phases of traced requests. None: no request is traced.
    """

    def __init__(
        self, versions: VersionManager, *, max_samples: int, device_id: int, tracing: RequestTracer | None
    ) -> None:
        self._versions = versions
        self._has_own_inputs = versions.spec.has_own_inputs
        self._device_id = device_id
        self._max_samples = max_samples
        self._tracing = tracing
        names = [tensor.name for tensor in versions.spec.inputs]
        self._reader = RequestReader(names, max_samples=max_samples, reads_probes=self._has_own_inputs)
        self._thread = ThreadTensors()
        self._num_failed = 0

    def stats(self) -> dict[str, Any]:
        """The counters of VersionManager.stats, and the number of requests that never reached it."""
        stats = self._versions.stats()
        for key in ("requests", "failed_requests"):
            stats[key] += self._num_failed
        return stats

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return self._versions.failure is None

    def answer(self, requests: Sequence[TritonRequest], on_phase: OnPhase | None = None) -> list[TritonResponse]:
        """One response for each request, in order. Their tensors are views of memory that the next call in this thread
        uses again: keep the requests, and send the responses, before.

        `on_phase`: see InferenceSession.run_many. None: `tracing` makes it.
        """
        if on_phase is None:
            if self._tracing is not None:
                with self._tracing.of(requests) as traced:
                    return self.answer(requests, traced)
            on_phase = ignore_phase
        on_phase("check")
        try:
            with self._versions.lease() as session:
                # The fast path for most requests: a list of arrays in, tensors out.
                if session.has_fast_path and (plain := self._reader.read(requests)) is not None:
                    arrays, outputs = plain
                    found: list[TritonResponse] | None
                    found = session.fast_path.run(arrays, len(requests), outputs, on_phase, self._responses)
                    if found is not None:
                        return found
                return self._answer_any(session, requests, on_phase)
        except Exception as error:  # noqa: BLE001  every request must get an answer, whatever the error
            if len(requests) == 1:
                return [self._failed(error)]
            return [self._answer_alone(request, on_phase) for request in requests]

    def _responses(self, joined: JoinedAnswer) -> list[TritonResponse]:
        """The responses to plain requests, with copies of their outputs."""
        if not self._has_own_inputs:
            joined = joined._replace(arrays=list(map(_hugectr_array, joined.arrays)))
        maker = self._thread.tensors
        tensors = None if maker is None else maker.of(joined)
        if tensors is None:
            return [self._response(answer, self._versions.spec) for answer in joined.copied_answers()]
        if len(joined.counts) == 1 and self._has_own_inputs:
            return [pb_utils.InferenceResponse(list(tensors))]
        # The tensors of each request lie together: zip takes the same number of them for each response.
        by_request = map(list, zip(*[tensors] * len(joined.arrays), strict=True))
        if self._has_own_inputs:
            return list(map(pb_utils.InferenceResponse, by_request))
        # HugeCTR's: requests of HPS have no fast path.
        return list(map(_response_with_parameters, by_request, repeat(self._device_id), joined.counts.tolist()))

    def _answer_any(
        self, session: InferenceSession, requests: Sequence[TritonRequest], on_phase: OnPhase
    ) -> list[TritonResponse]:
        read = [self._read(session, request) for request in requests]
        return [self._response(answer, session.spec) for answer in session.run_many(read, on_phase)]

    def _answer_alone(self, request: TritonRequest, on_phase: OnPhase) -> TritonResponse:
        """The answer to one of several requests, of which one failed, or all."""
        try:
            with self._versions.lease() as session:
                return self._answer_any(session, [request], on_phase)[0]
        except Exception as error:  # noqa: BLE001  as above
            return self._failed(error)

    def _failed(self, error: Exception) -> TritonResponse:
        self._num_failed += 1
        return _failure(error)

    def _read(self, session: InferenceSession, request: TritonRequest) -> Request:
        if is_probe(request.parameters()):
            return session.layout.generated(1)._replace(outputs=request.requested_output_names())
        inputs = {tensor.name(): read_array(tensor) for tensor in request.inputs()}
        if self._max_samples:
            for name, array in inputs.items():
                if array.ndim and len(array) > self._max_samples:
                    raise InvalidRequestError(
                        f"input {name!r} has {len(array)} samples, above the limit of {self._max_samples} "
                        "(max_samples_per_request)"
                    )
        return Request(inputs, request.requested_output_names())

    def _response(self, answer: Answer | HotrowError, spec: ModelSpec) -> TritonResponse:
        if isinstance(answer, HotrowError):
            return _failure(answer)
        if not self._has_own_inputs:
            return _hugectr_response(answer, spec, self._device_id)
        # Triton has no scalars: they are sent in shape [1].
        arrays = {name: array if array.ndim else array.reshape(1) for name, array in answer.items()}
        return pb_utils.InferenceResponse([write_tensor(name, array) for name, array in arrays.items()])


def _failure(error: Exception) -> TritonResponse:
    if not isinstance(error, (InvalidRequestError, UnavailableError)):
        pb_utils.Logger.log_error("".join(traceback.format_exception(error)))
    return pb_utils.InferenceResponse(error=triton_error(error))


def _hugectr_response(answer: Answer, spec: ModelSpec, device_id: int) -> Any:
    """Each output as `_hugectr_array` has it; HPS's vectors as they are."""
    tensors = [write_tensor(name, _hugectr_array(array)) for name, array in answer.items()]
    num_samples = len(next(iter(answer.values()))) if answer and spec.takes_hugectr_requests else None
    return _response_with_parameters(tensors, device_id, num_samples)


def _hugectr_array(array: NDArray[Any]) -> NDArray[Any]:
    """[num_samples] for one label, [num_samples, labels] for more."""
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


def _response_with_parameters(tensors: list[Any], device_id: int, num_samples: int | None) -> Any:
    """A response with the parameters `DeviceID` and, if known, `NumSample`: from Triton 25.02, which supports them."""
    if not _takes_parameters():
        return pb_utils.InferenceResponse(tensors)
    parameters = {"DeviceID": device_id}
    if num_samples is not None:
        parameters["NumSample"] = num_samples
    return pb_utils.InferenceResponse(tensors, parameters=parameters)


@cache
def _takes_parameters() -> bool:
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:  # before Triton 25.02
        return False
    return True
