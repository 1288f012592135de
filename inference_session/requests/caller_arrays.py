"""Arrays from Python callers: values that convert without loss are converted, others are an InvalidRequestError."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import TableSpec


def as_input(name: str, value: ArrayLike, expected: np.dtype[Any] | None) -> NDArray[Any]:
    """An input of a model: arrays whose type converts without loss, and lists of numbers that do. None: unchanged."""
    array = _as_array(f"input {name!r}", value)
    if expected is None:
        return array
    if np.can_cast(array.dtype, expected, "safe"):
        return array.astype(expected, copy=False)
    return array if isinstance(value, np.ndarray) else _narrowed(array, expected)


def as_keys(keys: ArrayLike) -> NDArray[np.int64]:
    """Keys int64 [n]."""
    wanted = _as_array("a list of keys", keys)
    if wanted.ndim != 1 or (wanted.size and not np.can_cast(wanted.dtype, np.int64, "safe")):
        raise InvalidRequestError(f"keys are {wanted.dtype} {list(wanted.shape)}, expected int64 [n]")
    return np.ascontiguousarray(wanted, np.int64)


def as_written_keys(keys: ArrayLike, spec: TableSpec) -> NDArray[np.int64]:
    """Keys of rows to be written. Stores accept row numbers from 0 only: no look-up would ever find another one."""
    wanted = as_keys(keys)
    if spec.keys == "row_number" and (wanted < 0).any():
        raise InvalidRequestError(
            f"table {spec.name!r} uses row numbers as keys, so keys must be at least 0; found {int(wanted.min())}"
        )
    return wanted


def as_rows(keys: ArrayLike, vectors: ArrayLike, spec: TableSpec) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows to be written: their keys, and vectors float32 [n, embedding_dim]."""
    wanted, rows = as_written_keys(keys, spec), np.ascontiguousarray(_as_array("a list of vectors", vectors))
    if rows.shape != (len(wanted), spec.embedding_dim) or not np.can_cast(rows.dtype, np.float32, "same_kind"):
        raise InvalidRequestError(
            f"table {spec.name!r}: vectors are {rows.dtype} {list(rows.shape)},"
            f" expected float32 {[len(wanted), spec.embedding_dim]}"
        )
    return wanted, rows.astype(np.float32, copy=False)


def _as_array(what: str, value: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"{what} cannot be converted to an array: {error}") from error


def _narrowed(array: NDArray[Any], expected: np.dtype[Any]) -> NDArray[Any]:
    """A list's numbers in the expected type; NumPy uses the widest. Unchanged where that loses any."""
    if array.size and array.dtype.kind + expected.kind not in ("ii", "iu", "if", "ff"):
        return array
    narrow = array.astype(expected)
    return array if expected.kind in "iu" and not np.array_equal(narrow, array) else narrow
