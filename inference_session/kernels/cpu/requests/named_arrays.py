"""What another library's objects own: items of certain names, and the arrays of these, without Python per item.

An object of pybind11 points to a C++ object, here an owner of items and of the names that it wants. To make Python
objects of items takes 0.3 microseconds each, and a method of one 0.1 to 0.2; in a process whose caches are cold, a
method that gives the wanted names takes 4. So compiled code reads all of it from the memory that the owner points to.
Nobody promises where it is there: `find_places` looks for what some objects have, and the memory is not read where that
is not found.
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
from inference_session.kernels.cpu.intrinsics import kernel, kernel_with_gil, load
from inference_session.kernels.cpu.requests.capsules import call
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import address_of

CONTENT = 16
"""In a Python object that pybind11 made (or ctypes, in tests), the address of what it stands for."""
ITEM_BYTES = 16
"""Of a std::shared_ptr, which begins with the address of an item's content."""
_SEARCHED_BYTES = 256
"""Of a content."""
_NODE_NAME = 32
"""In a node of a std::set, behind its color, its parent, and its left and right child: a NAME record."""
_MAX_DEPTH = 4
"""Of the sets that are looked for."""

NAME = np.dtype([("address", np.int64), ("length", np.int64)])
"""The characters of a name, as std::string begins with them."""
_INT64 = np.dtype(np.int64)


class Places(NamedTuple):
    """Where parts of contents are, by byte."""

    wanted: int
    """In that of an owner: the root of a std::set of names, followed by its first node, its last, and their number."""
    items: int
    """Where its items begin (std::shared_ptr), and behind that where they end."""
    name: int
    """In that of an item: a NAME record."""
    array: int
    """The address of an array."""


def find_places(owner: Any, wanted: Sequence[str], items: Sequence[tuple[Any, str, NDArray[Any]]]) -> Places | None:
    """Where an owner has these wanted names and these items, and where these have their names, which are not empty, and
    their arrays.

    None: in no place, or several. The memory is read as a file: that fails where there is none.
    """
    if not can_read_arrays():
        return None
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return None
    try:
        sets = _places_of_names(memory, owner, wanted)
        lists = _places_of_items(memory, owner, [item for item, *_ in items])
        found = [_places(memory, *each) for each in items]
    except OSError:
        return None
    finally:
        os.close(memory)
    names, arrays = (set.intersection(*places) for places in zip(*found, strict=True))
    all_places = sets, lists, names, arrays
    return Places(*itertools.chain(*all_places)) if all(len(places) == 1 for places in all_places) else None


def _places_of_names(memory: int, owner: Any, wanted: Sequence[str]) -> set[int]:
    """Where the owner may have the wanted names."""
    encoded = sorted(name.encode() for name in wanted)
    content = _content(memory, owner)
    words = _words(memory, content, _SEARCHED_BYTES)
    return {
        8 * i
        for i, (root, first, _, number) in enumerate(zip(words, words[1:], words[2:], words[3:], strict=False))
        if number == len(encoded)
        and _names_below(memory, root, content + 8 * i - 8, _MAX_DEPTH) == encoded
        and _names_below(memory, first, None, 1) == encoded[:1]
    }


def _names_below(memory: int, node: int, parent: int | None, depth: int) -> list[bytes]:
    """The names of a tree in their order; other names where there is no tree, of this parent, or a deeper one."""
    if not node or not depth:
        return []
    try:
        _, above, left, right, characters, length = _words(memory, node, 48)
        name = os.pread(memory, length % 256, characters)
    except (OSError, ValueError):  # no address
        return []
    if parent not in (above, None):
        return []
    below = [_names_below(memory, child, node, depth - 1) for child in (left, right)]
    return [*below[0], name, *below[1]]


def _places_of_items(memory: int, owner: Any, items: Sequence[Any]) -> set[int]:
    """Where the owner may have these items."""
    wanted = [_content(memory, item) for item in items]
    words = _words(memory, _content(memory, owner), _SEARCHED_BYTES)
    return {
        8 * i
        for i, (begin, end) in enumerate(itertools.pairwise(words))
        if end - begin == ITEM_BYTES * len(items) and _items_at(memory, begin, len(items)) == wanted
    }


def _items_at(memory: int, begin: int, num_items: int) -> list[int]:
    try:
        return _words(memory, begin, ITEM_BYTES * num_items)[:: ITEM_BYTES // 8]
    except (OSError, OverflowError):  # no address
        return []


def _places(memory: int, item: Any, name: str, array: NDArray[Any]) -> tuple[set[int], set[int]]:
    """Where the item may have its name, and where its array."""
    words, wanted = _words(memory, _content(memory, item), _SEARCHED_BYTES), name.encode()
    names = {
        8 * i
        for i, (address, length) in enumerate(itertools.pairwise(words))
        if length == len(wanted) and _is_at(memory, address, wanted)
    }
    return names, {8 * i for i, word in enumerate(words) if word == id(array)}


def _content(memory: int, item: Any) -> int:
    return _words(memory, id(item) + CONTENT, 8)[0]


def _words(memory: int, address: int, num_bytes: int) -> list[int]:
    content = os.pread(memory, num_bytes, address)
    return list(struct.unpack_from(f"{len(content) // 8}q", content))


def _is_at(memory: int, address: int, wanted: bytes) -> bool:
    try:
        return os.pread(memory, len(wanted), address) == wanted
    except OSError:
        return False


def array_taker(
    kind: type, places: Places, names: Sequence[str], wanted: Iterable[str]
) -> Callable[[int, int, int], int]:
    """`take_arrays` with its first argument, for owners of this type; the arrays come in the order of these names."""
    records, characters = _name_records(names)
    wanted_records, wanted_characters = _name_records(sorted(wanted, key=str.encode))
    keep, set_item = (
        ctypes.cast(getattr(ctypes.pythonapi, function), ctypes.c_void_p).value or 0
        for function in ("Py_IncRef", "PyList_SetItem")
    )
    numbers = id(kind), id(np.ndarray), id(None), *places, keep, set_item
    arguments = Arguments(records, wanted_records, np.arange(len(names)), *numbers, characters, wanted_characters)
    return arguments.bound_to(of_ints(take_arrays))


def _name_records(names: Sequence[str]) -> tuple[NDArray[np.void], NDArray[np.uint8]]:
    """NAME records, and the characters that they point to."""
    encoded = [name.encode() for name in names]
    characters, lengths = np.array(bytearray(b"".join(encoded)), np.uint8), np.array(list(map(len, encoded)), np.int64)
    records = np.zeros(len(names), NAME)
    records["address"], records["length"] = address_of(characters) + lengths.cumsum() - lengths, lengths
    return records, characters


@kernel_with_gil
def take_arrays(arguments: int, owners: int, num_owners: int, arrays: int) -> int:
    """Put the arrays of the items of some owners into a list, owner after owner, each in the place of its item's name.

    Returns 1, or 0 where an owner is not of the type, wants other names, or has not just items of these names, or one
    of them has no array of at least one element and one dimension. The list is then not complete.

    Args:
        arguments: address of Arguments:
            names: NAME records.
            wanted: NAME records, sorted by their characters.
            order: the number of the name that each item had last.
            owner_type: address of the type of the owners.
            array_type: address of NumPy's type of arrays.
            none: address of None.
            wanted_place: see Places.
            items_place: see Places.
            name_place: see Places.
            array_place: see Places.
            keep: address of Py_IncRef.
            set_item: address of PyList_SetItem.
        owners: address of a list of objects.
        num_owners: its length.
        arrays: address of a list of None, of which there is one for each name and owner.
    """
    num_names, first_owner = len(array_at(arguments, 0, NAME)), load(owners + LIST_ITEMS, np.int64, 0)
    for i in range(num_owners):
        owner = load(first_owner, np.int64, i)
        if load(owner + OBJECT_TYPE, np.int64, 0) != int_at(arguments, 3):
            return 0
        content = load(owner + CONTENT, np.int64, 0)
        if not _has_names(content + int_at(arguments, 6), array_at(arguments, 1, NAME)):
            return 0
        items = content + int_at(arguments, 7)
        begin, end = load(items, np.int64, 0), load(items, np.int64, 1)
        if end - begin != ITEM_BYTES * num_names or not _take_items(arguments, begin, arrays, i * num_names):
            return 0
    return 1


@kernel
def _has_names(root: int, names: Any) -> Any:
    """Whether a std::set, whose root is at this address, has just these sorted names."""
    if load(root, np.int64, 3) != len(names):
        return False
    node = load(root, np.int64, 1)
    for i in range(len(names)):
        if not _is_name(names[i], node + _NODE_NAME):
            return False
        node = _next_node(node)
    return True


@kernel
def _next_node(node: int) -> Any:
    """The node behind another one in the order of the set; behind the last one, that which points to the root."""
    child = load(node, np.int64, 3)
    if child != 0:
        while load(child, np.int64, 2) != 0:
            child = load(child, np.int64, 2)
        return child
    parent = load(node, np.int64, 1)
    while node == load(parent, np.int64, 3):
        node, parent = parent, load(parent, np.int64, 1)
    return parent


@kernel
def _take_items(arguments: int, items: int, arrays: int, first: int) -> Any:
    """Put the arrays of an owner's items into the list, from place `first` on; returns whether they are as expected."""
    names, order = array_at(arguments, 0, NAME), array_at(arguments, 2, _INT64)
    taken = load(arrays + LIST_ITEMS, np.int64, 0)
    for i in range(len(names)):
        item = load(items + ITEM_BYTES * i, np.int64, 0)
        if item == 0:
            return False
        number = _number_of(names, order[i], item + int_at(arguments, 8))
        array = load(item + int_at(arguments, 9), np.int64, 0)
        if number < 0 or array == 0 or load(array + OBJECT_TYPE, np.int64, 0) != int_at(arguments, 4):
            return False
        if not _has_elements(array) or load(taken, np.int64, first + number) != int_at(arguments, 5):
            return False
        order[i] = number
        call(int_at(arguments, 10), (array,))
        call(int_at(arguments, 11), (arrays, first + number, array))
    return True


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
    for i in range(len(names)):
        number = (first + i) % len(names)
        if _is_name(names[number], name):
            return np.int64(number)
    return np.int64(-1)


@kernel
def _is_name(record: Any, name: int) -> Any:
    """Whether a NAME record has the name whose record is at this address."""
    length = load(name, np.int64, 1)
    return record.length == length and _are_same(record.address, load(name, np.int64, 0), length)


@kernel
def _are_same(first: int, second: int, length: int) -> Any:
    i = np.int64(0)
    while i < length and load(first, np.uint8, i) == load(second, np.uint8, i):
        i += 1
    return i == length


def compile_kernels() -> None:
    """Compile what is here, or load it from Numba's cache."""
    of_ints(take_arrays)
