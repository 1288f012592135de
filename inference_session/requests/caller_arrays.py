"""Arrays from Python callers: values that convert without loss are converted, others are an InvalidRequestError.

Inputs may be on a GPU: objects with `__cuda_array_interface__`, such as CuPy's arrays and PyTorch's. A session on the
same GPU reads them where they are, if nothing in its model needs them on the host. Otherwise it copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import ModelSpec, TableSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.tensor_layout import TensorLayout


def as_input(name: str, value: ArrayLike, expected: np.dtype[Any] | None) -> NDArray[Any]:
    """An input of any shape in the expected type if no value is lost; otherwise, and for None, its own type stays."""
    array = _as_array(f"input {name!r}", value)
    if expected is None:
        return array
    if np.can_cast(array.dtype, expected, "safe"):
        return array.astype(expected, copy=False)
    return array if isinstance(value, np.ndarray) else _narrowed(array, expected)


def check_arguments(inputs: object, outputs: object) -> None:
    """Refuse inputs that are not by name, and outputs that are no list of names."""
    if not isinstance(inputs, Mapping):
        raise InvalidRequestError(f"inputs are of type {type(inputs).__name__}, expected a dict of arrays by name")
    if outputs is not None and (isinstance(outputs, str) or not isinstance(outputs, Iterable)):
        raise InvalidRequestError(f"outputs are {outputs!r}, expected a list of names")


def is_on_gpu(value: object) -> bool:
    """Whether a value is an array in the memory of a GPU."""
    return hasattr(value, "__cuda_array_interface__")


def inputs_with_gpu(
    inputs: Mapping[str, ArrayLike], types: Mapping[str, np.dtype[Any]], take: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """Inputs, of which some are on a GPU, where the session reads them.

    Args:
        inputs: by name, as a caller gave them.
        types: those of the model's inputs.
        take: gives an array's place on the session's GPU (`Device.given`); None: the session reads them on the host.
    """
    return {name: _input(name, value, types.get(name), take) for name, value in inputs.items()}


def _input(name: str, value: Any, expected: np.dtype[Any] | None, take: Callable[[Any], Any] | None) -> Any:
    if is_on_gpu(value):
        return copied_to_host(name, value) if take is None else take(value)
    array = as_input(name, value, expected)
    return array if take is None else take(array)


def copied_to_host(name: str, value: Any) -> NDArray[Any]:
    """A copy of an input, of its shape and type, in host memory; InvalidRequestError where CuPy, which makes it, is not
    installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise InvalidRequestError(
            f"input {name!r} lies on a GPU, and CuPy, which could copy it, is not installed ({error}): pass an array of"
            " NumPy"
        ) from error
    array: NDArray[Any] = cupy.asnumpy(cupy.asarray(value))
    return array


def may_stay_on_gpu(spec: ModelSpec, layout: RequestLayout) -> bool:
    """Whether look-ups and the dense network of a model read its inputs unchanged, and nothing else reads them."""
    lookups = spec.lookups
    plain = not any(lookup.bags or lookup.weights for lookup in lookups)
    inputs = {tensor.name for tensor in spec.inputs}
    numeric = all(np.dtype(tensor.dtype) != object for tensor in spec.inputs)
    has_keys = all(lookup.keys in inputs for lookup in lookups)
    return plain and numeric and has_keys and type(layout) is TensorLayout and spec.ranking is None


def as_keys(keys: ArrayLike) -> NDArray[np.int64]:
    """Keys int64 [n]."""
    wanted = _as_array("a list of keys", keys)
    if wanted.ndim != 1 or (wanted.size and not np.can_cast(wanted.dtype, np.int64, "safe")):
        raise InvalidRequestError(f"keys are {wanted.dtype} {list(wanted.shape)}, expected int64 [n]")
    return np.ascontiguousarray(wanted, np.int64)


def as_written_keys(keys: ArrayLike, spec: TableSpec) -> NDArray[np.int64]:
    """Keys of rows to be written: int64 [n]. Stores take row numbers from 0 only: no look-up would ever find others."""
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
    stored = _in_type(rows, np.dtype(np.float32))
    if not _holds_all(stored, rows):
        raise InvalidRequestError(f"table {spec.name!r}: vectors have elements that float32 cannot hold")
    return wanted, stored


def _in_type(array: NDArray[Any], expected: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # the caller looks
        return array.astype(expected, copy=False)


def _holds_all(narrow: NDArray[Any], array: NDArray[Any]) -> bool:
    """Whether no number became infinite in a narrower type."""
    return narrow is array or narrow.dtype.kind != "f" or not bool((np.isinf(narrow) & ~np.isinf(array)).any())


def has_masked(value: ArrayLike) -> bool:
    """Whether an array, or one of a list of arrays, has masked elements: NumPy would take what is below the mask."""
    if type(value) is np.ndarray:
        return False
    rows = value if isinstance(value, list | tuple) else [value]
    kinds = {*map(type, rows)}
    return any(issubclass(kind, np.ma.MaskedArray) for kind in kinds) and any(map(np.ma.is_masked, rows))


def _as_array(what: str, value: ArrayLike) -> NDArray[Any]:
    if has_masked(value):
        raise InvalidRequestError(f"{what} has masked elements: fill them first, for example with `array.filled(0)`")
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of different lengths; a tensor that has a gradient
        raise InvalidRequestError(f"{what} cannot be converted to an array: {error}") from error


def _narrowed(array: NDArray[Any], expected: np.dtype[Any]) -> NDArray[Any]:
    """Numbers of a list, to which NumPy gave the widest type, in the expected type; unchanged if any would be lost."""
    if array.size and array.dtype.kind + expected.kind not in ("ii", "iu", "if", "ff"):
        return array
    narrow = _in_type(array, expected)
    is_same = np.array_equal(narrow, array) if expected.kind in "iu" else _holds_all(narrow, array)
    return narrow if is_same else array
