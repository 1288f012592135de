"""Tensors that other libraries lend as capsules, by the layout that DLPack fixes (dlpack.h, version 0).

NumPy takes capsules over, after which nobody else may; HugeCTR's callers go on with theirs.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError

_CPU, _CUDA_HOST = 1, 3
_KINDS = {0: "i", 1: "u", 2: "f"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("num_dims", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def borrowed_array(name: str, capsule: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """The elements of a capsule, flat and not copied, as long as the tensor lives that it was made from.

    Raises:
        InvalidRequestError: it is no capsule, or holds something but such elements, side by side, in host memory.
    """
    tensor = _tensor(name, capsule)
    shape = [tensor.shape[axis] for axis in range(tensor.num_dims)]
    if tensor.device_type not in (_CPU, _CUDA_HOST):
        raise InvalidRequestError(
            f"{name} is on a device of DLPack's type {tensor.device_type}; host memory is expected"
        )
    found = f"{_KINDS.get(tensor.kind, '?')}{tensor.bits // 8}"
    if found != np.dtype(dtype).str[1:] or tensor.lanes != 1:
        raise InvalidRequestError(f"{name} holds elements {found!r}; {np.dtype(dtype).name} is expected")
    if not _is_contiguous(tensor, shape):
        raise InvalidRequestError(f"{name} has gaps between its elements; a contiguous tensor is expected")
    size = math.prod(shape)
    if not size:
        return np.empty(0, dtype)
    address = tensor.data + tensor.byte_offset
    data = (ctypes.c_byte * (size * tensor.bits // 8)).from_address(address)
    return np.frombuffer(data, dtype)


def _tensor(name: str, capsule: Any) -> _Tensor:
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        return ctypes.cast(address(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    except ValueError as error:
        raise InvalidRequestError(f"{name} is no DLPack capsule that is still unused, found {capsule!r}") from error


def _is_contiguous(tensor: _Tensor, shape: list[int]) -> bool:
    if not tensor.strides:
        return True
    step = 1
    for axis in reversed(range(tensor.num_dims)):
        if shape[axis] > 1 and tensor.strides[axis] != step:
            return False
        step *= shape[axis]
    return True
