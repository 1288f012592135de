"""Arrays over the tensors that DLPack capsules point to, without Python per tensor.

`np.from_dlpack` asks the owner of each tensor twice, by methods in Python, which takes most of its time. Here compiled
code holds the GIL, and calls functions of Python's and NumPy's C interfaces by their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from inference_session.kernels.array_headers import LIST_ITEMS, OBJECT_TYPE, can_read_arrays
from inference_session.kernels.cpu.arguments import Arguments, array_at
from inference_session.kernels.cpu.intrinsics import intrinsic, kernel, kernel_with_gil, load, pointer_to
from inference_session.kernels.cpu.requests.dlpack import MANAGED_TENSOR
from inference_session.kernels.machine_code import of_ints

NUMBER = np.dtype([("kind", np.int64), ("bits", np.int64), ("number", np.int64)], align=True)
"""A type of elements, as DLPack describes it, and its number in NumPy's C interface."""

_NUMPY = {"dtype_of_number": 45, "new_array": 94, "set_base": 282}
"""Places in the table of NumPy's C interface, which all of its releases keep: PyArray_DescrFromType, …"""
_ARRAY_TYPE_PLACE, _DTYPE_TYPE_PLACE = 2, 3
_PYTHON = {
    "is_valid": "PyCapsule_IsValid",
    "pointer_of": "PyCapsule_GetPointer",
    "set_item": "PyList_SetItem",
    "keep": "Py_IncRef",
    "clear_error": "PyErr_Clear",
}
_ADDRESSES = ("capsule_type", "array_type", "capsule_name", *_PYTHON, *_NUMPY)
INTERFACE = np.dtype([("devices", np.int64, 2), *((name, np.int64) for name in _ADDRESSES)])
"""Devices that are read, and the addresses of types, of the name of capsules, and of C functions."""

_NAME = ctypes.c_char_p(b"dltensor")
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_FIELDS: Any = MANAGED_TENSOR.fields
_DATA, _DEVICE, _RANK, _KIND, _BITS, _LANES, _SHAPE, _STRIDES, _OFFSET = (
    place for name, (_, place) in _FIELDS.items() if name not in ("device_id", "context", "deleter", "shape")
)
_WORD = ir.IntType(64)
_INT = 0xFFFFFFFF
"""The part of a word in which C functions return an int."""


def capsule_wrapper(kinds: Mapping[str, int], devices: tuple[int, int]) -> Callable[[int, int], int] | None:
    """`wrap_capsules` with its first argument; None: Python or NumPy is not as expected.

    Args:
        kinds: DLPack's codes of types, by NumPy's kinds.
        devices: DLPack's types of devices whose memory the processor reads.
    """
    if not can_read_arrays():
        return None
    capsule: Any = import_module("numpy._core._multiarray_umath")._ARRAY_API
    table = ctypes.cast(_pointer_of(capsule, None), ctypes.POINTER(ctypes.c_int64))
    if (table[_ARRAY_TYPE_PLACE], table[_DTYPE_TYPE_PLACE]) != (id(np.ndarray), id(np.dtype)):
        return None
    interface = np.zeros(1, INTERFACE)
    interface["devices"] = devices
    capsule_type = type(capsule)
    interface["capsule_type"], interface["array_type"] = id(capsule_type), id(np.ndarray)
    interface["capsule_name"] = ctypes.cast(_NAME, ctypes.c_void_p).value
    for name, function in _PYTHON.items():
        interface[name] = ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value
    for name, place in _NUMPY.items():
        interface[name] = table[place]
    dtypes = [np.dtype(name) for name in ("i8", "f4", "i4", "f8", "f2", "i2", "i1", "u1", "u2", "u4", "u8", "?")]
    numbers = np.array([(kinds[dtype.kind], 8 * dtype.itemsize, dtype.num) for dtype in dtypes], NUMBER)
    return Arguments(interface, numbers).bound_to(of_ints(wrap_capsules))


@intrinsic
def call(_context: Any, _function: Any, arguments: Any) -> Any:
    """call(address, (a, b, …)) → what the C function at the address returns; all are whole numbers or addresses."""
    declared = ir.FunctionType(_WORD, [_WORD] * len(arguments))

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        address, packed = values
        given = [builder.extract_value(packed, i) for i in range(len(arguments))]
        return builder.call(pointer_to(builder, address, declared), given)

    return types.int64(types.int64, arguments), build


@kernel_with_gil
def wrap_capsules(arguments: int, items: int, num_capsules: int) -> int:
    """Replace the capsules in a list by read-only arrays, which keep them alive; returns how many were replaced.

    It stops at the first that points to no contiguous tensor of a known type in host memory.

    Args:
        arguments: address of Arguments: an INTERFACE record, and NUMBER records.
        items: address of the list.
        num_capsules: its length.
    """
    interface, numbers = array_at(arguments, 0, INTERFACE)[0], array_at(arguments, 1, NUMBER)
    for i in range(num_capsules):
        capsule = load(load(items + LIST_ITEMS, np.int64, 0), np.int64, i)
        if load(capsule + OBJECT_TYPE, np.int64, 0) != interface.capsule_type:
            return i
        if not call(interface.is_valid, (capsule, interface.capsule_name)) & _INT:
            return i
        tensor = call(interface.pointer_of, (capsule, interface.capsule_name))
        number = _number_of(tensor, interface.devices, numbers)
        if number < 0 or not _is_contiguous(tensor):
            return i
        dtype = call(interface.dtype_of_number, (number,))
        rank, sizes = np.int64(load(tensor + _RANK, np.int32, 0)), load(tensor + _SHAPE, np.int64, 0)
        data = load(tensor + _DATA, np.int64, 0) + load(tensor + _OFFSET, np.int64, 0)
        array = call(interface.new_array, (interface.array_type, dtype, rank, sizes, 0, data, 0, 0))
        if array == 0:
            call(interface.clear_error, (0,))
            return i
        call(interface.keep, (capsule,))
        call(interface.set_base, (array, capsule))
        call(interface.set_item, (items, i, array))
    return num_capsules


@kernel
def _number_of(tensor: int, devices: Any, numbers: Any) -> Any:
    """The number of the type of a tensor's elements; -1: it is none of these, or they are not in host memory."""
    device = load(tensor + _DEVICE, np.int32, 0)
    if device not in (devices[0], devices[1]) or load(tensor + _LANES, np.uint16, 0) != 1:
        return np.int64(-1)
    kind, bits = load(tensor + _KIND, np.uint8, 0), load(tensor + _BITS, np.uint8, 0)
    for number in numbers:
        if number.kind == kind and number.bits == bits:
            return number.number
    return np.int64(-1)


@kernel
def _is_contiguous(tensor: int) -> Any:
    """Whether the last axis varies fastest, without gaps."""
    strides, sizes = load(tensor + _STRIDES, np.int64, 0), load(tensor + _SHAPE, np.int64, 0)
    if strides == 0:
        return True
    expected = np.int64(1)
    for axis in range(load(tensor + _RANK, np.int32, 0) - 1, -1, -1):
        if load(strides, np.int64, axis) != expected:
            return False
        expected *= load(sizes, np.int64, axis)
    return True


def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache."""
    of_ints(wrap_capsules)
