"""Answers in the form that clients of HugeCTR's backend and of HPS expect."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import triton_python_backend_utils as pb_utils

from inference_session.model_spec import ModelSpec
from inference_session.requests.outputs import Answer
from triton_backend.backend.tensors import write_tensor


def packed_response(answer: Answer, spec: ModelSpec, device_id: int) -> Any:
    """OUTPUT0 as [num_samples] for one label, [num_samples, labels] for more; HPS's vectors as they are.

    With the response parameters `NumSample` and `DeviceID`, if the server supports any (from Triton 25.02).
    """
    parameters = {"DeviceID": device_id}
    tensors = []
    for name, array in answer.items():
        if spec.takes_hugectr_requests:
            parameters["NumSample"] = len(array)
        one_label = array.ndim == 2 and array.shape[1] == 1
        tensors.append(write_tensor(name, array.reshape(-1) if one_label else array))
    return pb_utils.InferenceResponse(tensors, **_accepted(parameters))


def _accepted(parameters: Mapping[str, int]) -> dict[str, Any]:
    return {"parameters": parameters} if _takes_parameters() else {}


@cache
def _takes_parameters() -> bool:
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:  # before Triton 25.02
        return False
    return True
