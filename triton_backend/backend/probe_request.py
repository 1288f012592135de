"""The request that a model of hotrow's answers to a probe (triton_backend/client/probe.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec, TensorSpec
from inference_session.requests.hugectr_csr import DENSE, HPS_COUNTS, HPS_KEYS, KEYS, OFFSETS


def probe_request(spec: ModelSpec) -> dict[str, NDArray[Any]]:
    """One sample that a model of hotrow's takes."""
    if spec.takes_hugectr_requests:
        options = spec.layout_options
        return {
            DENSE: np.zeros(options["dense_dim"], np.float32),
            KEYS: np.zeros(sum(options["slots"]), options["key_type"]),
            OFFSETS: np.concatenate([np.arange(slots + 1, dtype=np.int32) for slots in options["slots"]]),
        }
    if spec.answers_vectors:
        return {HPS_KEYS: np.zeros(len(spec.tables), np.int64), HPS_COUNTS: np.ones(len(spec.tables), np.int32)}
    return {tensor.name: _zeros(tensor) for tensor in spec.inputs}


def _zeros(tensor: TensorSpec) -> NDArray[Any]:
    shape = [max(size, 1) for size in tensor.shape]
    return np.full(shape, "", object) if tensor.dtype == "object" else np.zeros(shape, tensor.dtype)
