"""Arrays of objects by the objects' names, compared with asking the objects themselves.

A ctypes.Structure stands in for an object that pybind11 made: both hold the address of their content at the same place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.kernels.cpu import named_arrays as module
from inference_session.kernels.cpu.named_arrays import Places, array_taker, find_places

Named = tuple[str, Any]
NAMES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40), max_size=9, unique=True)


def structure(*fields: str) -> type:
    """A type of objects with these fields, among which `name` is an address and a length, and `array` an object."""
    types = {"name": ctypes.c_int64 * 2, "array": ctypes.py_object}
    return type("Item", (ctypes.Structure,), {"_fields_": [(each, types.get(each, ctypes.c_int64)) for each in fields]})


Item = structure("name", "type", "array", "data")
PLACES = Places(name=0, array=24)


def make(name: str, array: Any, kind: type = Item) -> Any:
    """An object of this name and with this array; None: with no array."""
    item: Any = kind()
    item.kept = np.array(bytearray(name.encode()) or [0], np.uint8)
    item.name[:] = item.kept.ctypes.data, len(name.encode())
    if array is not None:
        item.array = array
    return item


def taken(take: Callable[[int, int, int], int], items: Sequence[Any], num_names: int) -> list[Any] | None:
    """The arrays in the order of the names."""
    arrays: list[Any] = [None] * num_names
    items = list(items)
    return arrays if take(id(items), len(items), id(arrays)) else None


@given(names=NAMES, data=st.data())
def test_arrays_come_in_the_order_of_the_names(names: list[str], data: st.DataObject) -> None:
    """Whatever the order of the objects, and whatever it was before."""
    take = array_taker(Item, PLACES, names)
    arrays = {name: np.arange(1 + i) for i, name in enumerate(names)}
    for _ in range(3):
        order = data.draw(st.permutations(names))
        found = taken(take, [make(name, arrays[name]) for name in order], len(names))
        assert found is not None
        assert all(one is arrays[name] for one, name in zip(found, names, strict=True))


@given(names=NAMES.filter(bool), sent=NAMES)
def test_other_names_are_refused(names: list[str], sent: list[str]) -> None:
    """Also more or fewer of them; and one that comes twice."""
    take = array_taker(Item, PLACES, names)
    found = taken(take, [make(name, np.zeros(1)) for name in sent], len(names))
    assert (found is not None) == (sorted(sent) == sorted(names))
    twice = [names[0], *names[:-1]]
    assert (taken(take, [make(name, np.zeros(1)) for name in twice], len(names)) is None) == (len(names) > 1)


@pytest.mark.parametrize(
    "array",
    [None, [1.0], 5, np.ma.zeros(2), np.float32(1), np.array(None), np.zeros(0), np.zeros((2, 0))],
    ids=lambda each: f"{type(each).__name__}{np.shape(each)}",
)
def test_objects_without_an_array_are_refused(array: Any) -> None:
    """Tensors on a GPU have an array of None; arrays without elements are left to the caller."""
    take = array_taker(Item, PLACES, ["x", "y"])
    good = make("x", np.zeros(1))
    assert taken(take, [good, make("y", array)], 2) is None
    assert taken(take, [good, make("y", np.zeros(1))], 2) is not None


@pytest.mark.parametrize("other", [object(), None, 5, make("x", np.zeros(1), structure("name", "type", "array"))])
def test_objects_of_other_types_are_refused(other: Any) -> None:
    """Their memory is not read."""
    take = array_taker(Item, PLACES, ["x"])
    assert taken(take, [other], 1) is None


def test_arrays_are_counted_as_long_as_they_are_held() -> None:
    """The list holds each of them once, also where it is not completed."""
    take = array_taker(Item, PLACES, ["x", "y"])
    array = np.zeros(3)
    good, bad = [make("x", array), make("y", array)], [make("x", array), make("z", array)]
    before = sys.getrefcount(array)
    found = taken(take, good, 2)
    assert sys.getrefcount(array) == before + 2
    assert taken(take, bad, 2) is None
    del found
    assert sys.getrefcount(array) == before


def samples(kind: type) -> list[tuple[Any, str, NDArray[Any]]]:
    """Objects, and what they have."""
    each = [(name, np.zeros(1 + i)) for i, name in enumerate(("a", "fifteen letters", "a longer name than these"))]
    return [(make(name, array, kind), name, array) for name, array in each]


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        (("name", "array"), Places(0, 16)),
        (("array", "name"), Places(8, 0)),
        (("a", "b", "array", "c", "name", "d"), Places(32, 16)),
    ],
)
def test_places_are_found(fields: tuple[str, ...], places: Places) -> None:
    """Wherever they are in the content."""
    kind = structure(*fields)
    assert find_places(samples(kind)) == places
    assert find_places(reversed(samples(kind))) == places


def test_places_that_are_not_the_same_in_all_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those of objects written in Python, nor where arrays cannot be read, nor with the wrong names."""

    class Plain:
        def __init__(self, name: str, array: NDArray[Any]) -> None:
            self.name, self.array = name, array

    mixed = [samples(Item)[0], *samples(structure("array", "name"))[1:]]
    assert find_places(mixed) is None
    assert find_places([(Plain(name, array), name, array) for _, name, array in samples(Item)]) is None
    assert find_places([(item, f"{name}!", array) for item, name, array in samples(Item)]) is None
    assert find_places([(item, name, array.copy()) for item, name, array in samples(Item)]) is None
    assert find_places(samples(Item)) == PLACES
    monkeypatch.setattr(module, "can_read_arrays", lambda: False)
    assert find_places(samples(Item)) is None


def test_a_process_that_may_not_read_its_memory_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without /proc."""

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert find_places(samples(Item)) is None
