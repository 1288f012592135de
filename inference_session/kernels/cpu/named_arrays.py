"""The arrays of another library's objects, in the order of the objects' names, without Python per object.

A method of an object that pybind11 made takes 0.1 to 0.2 microseconds. Here compiled code reads the name and the array
of each object from the C++ object that it leads to. Nobody promises where they are in it: `find_places` looks for those
of some objects, and the memory is not read where they are not found.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.array_headers import LIST_ITEMS, OBJECT_TYPE, RANK, SIZES, can_read_arrays
from inference_session.kernels.cpu.arguments import Arguments, array_at, int_at
from inference_session.kernels.cpu.capsules import call
from inference_session.kernels.cpu.intrinsics import kernel, kernel_with_gil, load
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import address_of

CONTENT = 16
"""In a Python object that pybind11 made (or ctypes, in tests), the address of what it stands for."""
_SEARCHED_BYTES = 256
"""Of that."""

NAME = np.dtype([("address", np.int64), ("length", np.int64)])
"""The characters of a name, as std::string begins with them."""
_INT64 = np.dtype(np.int64)


class Places(NamedTuple):
    """Where the parts of an object's content are, by byte."""

    name: int
    """A NAME record."""
    array: int
    """The address of an array."""


def find_places(objects: Iterable[tuple[Any, str, NDArray[Any]]]) -> Places | None:
    """Where objects of one type have these names, which are not empty, and these arrays; None: in no place, or several.

    Their memory is read as a file: that fails where there is none.
    """
    if not can_read_arrays():
        return None
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        found = [_places(memory, *each) for each in objects]
    except OSError:
        return None
    finally:
        os.close(memory)
    names, arrays = (set.intersection(*sets) for sets in zip(*found, strict=True))
    return Places(*names, *arrays) if len(names) == len(arrays) == 1 else None


def _places(memory: int, item: Any, name: str, array: NDArray[Any]) -> tuple[set[int], set[int]]:
    """Where the object may have its name, and where its array."""
    (content,) = _words(memory, id(item) + CONTENT, 8)
    words, wanted = _words(memory, content, _SEARCHED_BYTES), name.encode()
    names = {
        8 * i
        for i, (address, length) in enumerate(itertools.pairwise(words))
        if length == len(wanted) and _is_at(memory, address, wanted)
    }
    return names, {8 * i for i, word in enumerate(words) if word == id(array)}


def _words(memory: int, address: int, num_bytes: int) -> list[int]:
    content = os.pread(memory, num_bytes, address)
    return list(struct.unpack_from(f"{len(content) // 8}q", content))


def _is_at(memory: int, address: int, wanted: bytes) -> bool:
    try:
        return os.pread(memory, len(wanted), address) == wanted
    except OSError:
        return False


def array_taker(kind: type, places: Places, names: Sequence[str]) -> Callable[[int, int, int], int]:
    """`take_arrays` with its first argument, for objects of this type; the arrays come in the order of these names."""
    encoded = [name.encode() for name in names]
    characters, lengths = np.array(bytearray(b"".join(encoded)), np.uint8), np.array(list(map(len, encoded)), np.int64)
    records = np.zeros(len(names), NAME)
    records["address"], records["length"] = address_of(characters) + lengths.cumsum() - lengths, lengths
    keep, set_item = (
        ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value or 0
        for function in ("Py_IncRef", "PyList_SetItem")
    )
    order = np.arange(len(names))
    numbers = id(kind), id(np.ndarray), id(None), *places, keep, set_item
    return Arguments(records, order, *numbers, characters).bound_to(of_ints(take_arrays))


@kernel_with_gil
def take_arrays(arguments: int, objects: int, num_objects: int, arrays: int) -> int:
    """Put the arrays of some objects into a list, each in the place of its object's name; returns 1, or 0 where the
    objects are not of the type, have no arrays of at least one element and one dimension, or have not just these names.
    The list is then not complete.

    Args:
        arguments: address of Arguments:
            names: NAME records.
            order: the number of the name that each object had last.
            object_type: address of the type of the objects.
            array_type: address of NumPy's type of arrays.
            none: address of None.
            name_place: see Places.
            array_place: see Places.
            keep: address of Py_IncRef.
            set_item: address of PyList_SetItem.
        objects: address of a list of objects.
        num_objects: its length.
        arrays: address of a list of None, of which there is one for each name.
    """
    names, order = array_at(arguments, 0, NAME), array_at(arguments, 1, _INT64)
    if num_objects != len(names):
        return 0
    items, taken = load(objects + LIST_ITEMS, np.int64, 0), load(arrays + LIST_ITEMS, np.int64, 0)
    for i in range(num_objects):
        item = load(items, np.int64, i)
        if load(item + OBJECT_TYPE, np.int64, 0) != int_at(arguments, 2):
            return 0
        content = load(item + CONTENT, np.int64, 0)
        number = _number_of(names, order[i], content + int_at(arguments, 5))
        array = load(content + int_at(arguments, 6), np.int64, 0)
        if number < 0 or array == 0 or load(array + OBJECT_TYPE, np.int64, 0) != int_at(arguments, 3):
            return 0
        if not _has_elements(array):
            return 0
        if load(taken, np.int64, number) != int_at(arguments, 4):
            return 0
        order[i] = number
        call(int_at(arguments, 7), (array,))
        call(int_at(arguments, 8), (arrays, number, array))
    return 1


@kernel
def _has_elements(array: int) -> bool:
    """Where a tensor has no array, as on a GPU, pybind11 has one of None, without dimensions."""
    rank, sizes = load(array + RANK, np.int32, 0), load(array + SIZES, np.int64, 0)
    for i in range(rank):
        if load(sizes, np.int64, i) == 0:
            return False
    return bool(rank > 0)


@kernel
def _number_of(names: Any, first: int, name: int) -> Any:
    """The number of the name whose record is at this address, `first` if it is that one; -1: it is none of them."""
    address, length = load(name, np.int64, 0), load(name, np.int64, 1)
    for i in range(len(names)):
        number = (first + i) % len(names)
        if names[number].length == length and _are_same(names[number].address, address, length):
            return np.int64(number)
    return np.int64(-1)


@kernel
def _are_same(first: int, second: int, length: int) -> Any:
    i = np.int64(0)
    while i < length and load(first, np.uint8, i) == load(second, np.uint8, i):
        i += 1
    return i == length


def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache."""
    of_ints(take_arrays)
