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
from inference_session.model_spec import NamedArrays
from triton_backend.client.probe_inputs import DATATYPES


@dataclass(frozen=True)
class RecordedRequest:
    """One line of a file."""

    inputs: NamedArrays
    datatypes: Mapping[str, str]


def read_requests(path: Path) -> list[RecordedRequest]:
    """The requests of a file.

    Raises:
        ModelFormatError: names an invalid line, or there is no request.
    """
    requests = list(_parsed(path))
    if not requests:
        raise ModelFormatError(f"{path}: holds no request")
    return requests


def _parsed(path: Path) -> Iterator[RecordedRequest]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line)["inputs"])
        except json.JSONDecodeError as error:
            raise ModelFormatError(f"{path}, line {number}: not JSON: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelFormatError(f"{path}, line {number}: not a request in JSON: {error!r}") from error


def _request(given: list[Mapping[str, Any]]) -> RecordedRequest:
    tensors = {_name(tensor): tensor for tensor in given}
    if len(tensors) < len(given):
        raise ValueError("an input comes twice")
    return RecordedRequest(
        {name: _array(tensor) for name, tensor in tensors.items()},
        {name: tensor["datatype"] for name, tensor in tensors.items()},
    )


def _name(tensor: Mapping[str, Any]) -> str:
    name = tensor["name"]
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of an input")
    return name


def _array(tensor: Mapping[str, Any]) -> NDArray[Any]:
    if tensor["datatype"] == "BYTES":
        flat = np.array([text.encode() for text in np.ravel(tensor["data"]).tolist()], object)
    else:
        dtype, given = np.dtype(DATATYPES[tensor["datatype"]]), np.ravel(np.array(tensor["data"], object))
        if not all(_fits(value, dtype) for value in given):
            raise ValueError(f"the data of input {tensor['name']!r} are not {tensor['datatype']}")
        flat = given.astype(dtype)
    array: NDArray[Any] = flat.reshape(tensor["shape"])
    return array


def _fits(value: object, dtype: np.dtype[Any]) -> bool:
    if type(value) is int and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return bool(limits.min <= value <= limits.max)
    return type(value) in _TYPES[dtype.kind]


_TYPES: dict[str, set[type]] = {"b": {bool, int}, "i": set(), "u": set(), "f": {int, float}}
"""What else JSON may give, by NumPy's kinds of types."""


def not_finite(answer: NamedArrays) -> list[str]:
    """Outputs that hold NaN or infinity."""
    return [name for name, array in answer.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]


def largest_difference(answer: NamedArrays, other: NamedArrays) -> float:
    """The difference of the numbers in two answers; infinite where their outputs, shapes or other values differ."""
    if {name: array.shape for name, array in answer.items()} != {name: array.shape for name, array in other.items()}:
        return float("inf")
    return float(np.max([_difference(array, other[name]) for name, array in answer.items()], initial=0.0))


def _difference(array: NDArray[Any], other: NDArray[Any]) -> float:
    """NaN if one has it."""
    if array.dtype.kind not in "iuf" or other.dtype.kind not in "iuf":
        return 0.0 if np.array_equal(array, other) else float("inf")
    largest = float(np.abs(array.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))
    differs = array.dtype.kind != "f" and not np.array_equal(array, other)
    return max(largest, 1.0) if differs else largest  # whole numbers that are one apart may be the same float64
