"""Inputs that a caller has on a GPU: objects with `__cuda_array_interface__`, such as CuPy's arrays and PyTorch's.

A session on the same GPU reads them where they are, if nothing in its model needs them on the host. Otherwise it copies
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import ModelSpec
from inference_session.requests.batch import RequestLayout
from inference_session.requests.caller_arrays import as_input
from inference_session.requests.tensor_layout import TensorLayout


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
    """A copy of an input in host memory; InvalidRequestError where CuPy, which makes it, is not installed."""
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
