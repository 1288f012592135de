"""NumPy arrays for the Python backend by way of DLPack.

Stubs before Triton 25 are built against NumPy 1 and misread the item size of NumPy 2's arrays: `as_numpy` returns
wrong values, and tensors made of arrays are empty. DLPack capsules do not pass through NumPy. Those that NumPy makes
itself cannot be used either: it requires a certain name for a consumed capsule, and the stub uses another.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.platform.dlpack_layout import CPU, KINDS, DataType, Tensor

_DEVICE = (CPU, 0)


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_exported: dict[int, tuple[Any, ...]] = {}
"""What must outlive a capsule, by the number in its `context`, until the consumer calls the deleter."""
_numbers = itertools.count(1)


def _forget(managed: Any) -> None:
    _exported.pop(managed.contents.context, None)


_release = _Deleter(_forget)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_NAME = ctypes.c_char_p(b"dltensor")


class ExportedTensor:
    """A contiguous array as an object with `__dlpack__`, consumed once."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = np.ascontiguousarray(array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE

    def __dlpack__(self, stream: object = None) -> object:
        array = self._array
        dtype = DataType(KINDS[array.dtype.kind], 8 * array.itemsize, 1)
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        tensor = Tensor(array.ctypes.data, *_DEVICE, array.ndim, dtype, shape, None, 0)
        number = next(_numbers)
        managed = _ManagedTensor(tensor, number, _release)
        _exported[number] = (array, shape, managed)
        return _new_capsule(ctypes.addressof(managed), _NAME, None)


class ImportedTensor:
    """A tensor of the Python backend for `np.from_dlpack`, which passes arguments that the stub does not know."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DEVICE

    def __dlpack__(self, **options: object) -> Any:
        return self._tensor.to_dlpack()
