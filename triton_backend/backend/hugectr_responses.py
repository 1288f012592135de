"""Answers in the form that clients of HugeCTR's backend and of HPS expect."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec
from inference_session.requests.outputs import Answer
from triton_backend.backend.tensors import write_tensor


def hugectr_response(answer: Answer, spec: ModelSpec, device_id: int) -> Any:
    """Each output as `hugectr_array` has it; HPS's vectors as they are."""
    tensors = [write_tensor(name, hugectr_array(array)) for name, array in answer.items()]
    num_samples = len(next(iter(answer.values()))) if answer and spec.takes_hugectr_requests else None
    return response_with_parameters(tensors, device_id, num_samples)


def hugectr_array(array: NDArray[Any]) -> NDArray[Any]:
    """[num_samples] for one label, [num_samples, labels] for more."""
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array


def response_with_parameters(tensors: list[Any], device_id: int, num_samples: int | None) -> Any:
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
