"""Tensors that other libraries lend as DLPack capsules.

NumPy consumes a capsule, after which no other reader may use it; HugeCTR's callers continue to use theirs.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.platform.dlpack_layout import CPU, CUDA_HOST, KINDS, Tensor

_KINDS = {code: kind for kind, code in KINDS.items()}


def borrowed_array(name: str, capsule: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """The elements of a capsule, [n] of this type, not copied, as long as the tensor lives that it was made from.

    Raises:
        InvalidRequestError: it is no capsule, or does not hold such elements contiguously in host memory.
    """
    tensor = _tensor(name, capsule)
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    if tensor.device_type not in (CPU, CUDA_HOST):
        raise InvalidRequestError(f"{name} is on a device of DLPack type {tensor.device_type}; expected host memory")
    found = f"{_KINDS.get(tensor.dtype.code, '?')}{tensor.dtype.bits // 8}"
    if found != np.dtype(dtype).str[1:] or tensor.dtype.lanes != 1:
        raise InvalidRequestError(f"{name} holds elements {found!r}; expected {np.dtype(dtype).name}")
    if not _is_contiguous(tensor, shape):
        raise InvalidRequestError(f"{name} has gaps between its elements; expected a contiguous tensor")
    size = math.prod(shape)
    if not size:
        return np.empty(0, dtype)
    address = tensor.data + tensor.byte_offset
    data = (ctypes.c_byte * (size * tensor.dtype.bits // 8)).from_address(address)
    return np.frombuffer(data, dtype)


def _tensor(name: str, capsule: Any) -> Tensor:
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        return ctypes.cast(address(capsule, b"dltensor"), ctypes.POINTER(Tensor)).contents
    except ValueError as error:
        raise InvalidRequestError(f"{name} is not an unused DLPack capsule, found {capsule!r}") from error


def _is_contiguous(tensor: Tensor, shape: list[int]) -> bool:
    if not tensor.strides:
        return True
    step = 1
    for axis in reversed(range(tensor.ndim)):
        if shape[axis] > 1 and tensor.strides[axis] != step:
            return False
        step *= shape[axis]
    return True
