"""Requests recorded in a file, and the answers of two versions of a model to them.

A file holds a request per line, as JSON of the inference protocol that Triton serves over HTTP:
{"inputs": [{"name": "ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError
from triton_backend.client.probe_inputs import DATATYPES

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RecordedRequest:
    """One line of a file."""

    inputs: Arrays
    datatypes: Mapping[str, str]


def read_requests(path: Path) -> Iterator[RecordedRequest]:
    """The requests of a file; ModelFormatError names an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tensors = json.loads(line)["inputs"]
            inputs = {tensor["name"]: _array(tensor) for tensor in tensors}
            datatypes = {tensor["name"]: tensor["datatype"] for tensor in tensors}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelFormatError(f"{path}, line {number}: not a request in JSON: {error!r}") from error
        yield RecordedRequest(inputs, datatypes)


def _array(tensor: Mapping[str, Any]) -> NDArray[Any]:
    if tensor["datatype"] == "BYTES":
        flat = np.array([text.encode() for text in np.ravel(tensor["data"]).tolist()], object)
    else:
        flat = np.ravel(np.array(tensor["data"], DATATYPES[tensor["datatype"]]))
    array: NDArray[Any] = flat.reshape(tensor["shape"])
    return array


def not_finite(answer: Arrays) -> list[str]:
    """Outputs that hold NaN or infinity."""
    return [name for name, array in answer.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]


def largest_difference(answer: Arrays, other: Arrays) -> float:
    """The difference of the numbers in two answers; infinite where their outputs, shapes or other values differ."""
    if {name: array.shape for name, array in answer.items()} != {name: array.shape for name, array in other.items()}:
        return float("inf")
    return max((_difference(array, other[name]) for name, array in answer.items()), default=0.0)


def _difference(array: NDArray[Any], other: NDArray[Any]) -> float:
    if array.dtype.kind in "iuf" and other.dtype.kind in "iuf":
        return float(np.abs(array.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))
    return 0.0 if np.array_equal(array, other) else float("inf")
