"""The inputs of a probe (probe.py): of size 1 wherever the model leaves it open, all values 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import NamedArrays

DATATYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BF16": np.float32,
}  # fmt: skip
"""By the names of the inference protocol; BF16 is sent as FP32."""


def probe_inputs(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> NamedArrays | None:
    """The request for inputs of these names, types and shapes; None where one has a type that cannot be sent."""
    inputs: dict[str, NDArray[Any]] = {}
    for name, datatype, shape in tensors:
        sizes = [max(size, 1) for size in shape]
        if datatype == "BYTES":
            inputs[name] = np.full(sizes, b"", object)
        elif datatype in DATATYPES:
            inputs[name] = np.zeros(sizes, DATATYPES[datatype])
        else:
            return None
    return inputs
