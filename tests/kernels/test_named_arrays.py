"""Arrays of items by the items' names, and names that are wanted, compared with asking for them.

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

from inference_session.kernels.cpu.requests import named_arrays as module
from inference_session.kernels.cpu.requests.named_arrays import Places, array_taker, find_places
from tests.testing.name_sets import insert_all

Named = tuple[str, Any]
NAMES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40), max_size=9, unique=True)


def structure(*fields: str) -> type:
    """A type of objects with these fields; `array` is an object, the others are numbers, some of them several."""
    types: dict[str, type] = {"name": ctypes.c_int64 * 2, "items": ctypes.c_int64 * 2, "wanted": ctypes.c_int64 * 5}
    types["array"] = ctypes.py_object
    return type("Made", (ctypes.Structure,), {"_fields_": [(each, types.get(each, ctypes.c_int64)) for each in fields]})


Item = structure("name", "type", "array", "data")
Owner = structure("id", "items", "wanted")
PLACES = Places(wanted=32, items=8, name=0, array=24)
WANTED = "an output", "another output, of a longer name", "x"


def make(name: str, array: Any, kind: type = Item) -> Any:
    """An item of this name and with this array; None: with no array."""
    item: Any = kind()
    item.kept = np.array(bytearray(name.encode()) or [0], np.uint8)
    item.name[:] = item.kept.ctypes.data, len(name.encode())
    if array is not None:
        item.array = array
    return item


def own(items: Sequence[Any], kind: type = Owner, wanted: Sequence[str] = WANTED) -> Any:
    """An object that owns these items, and wants these names; None: its pointer is null."""
    owner: Any = kind()
    pointers = np.array([(0 if item is None else ctypes.addressof(item), 1) for item in items], np.int64).reshape(-1, 2)
    owner.items[:] = pointers.ctypes.data, pointers.ctypes.data + pointers.nbytes
    owner.kept = items, pointers
    if wanted and hasattr(owner, "wanted"):
        owner.kept_set = insert_all(owner, wanted)
    return owner


def taken(take: Callable[[int, int, int], int], owners: Sequence[Any], num_names: int) -> list[Any] | None:
    """The arrays, owner after owner, in the order of the names."""
    arrays: list[Any] = [None] * (len(owners) * num_names)
    owners = list(owners)
    return arrays if take(id(owners), len(owners), id(arrays)) else None


@given(names=NAMES, data=st.data())
def test_arrays_come_in_the_order_of_the_names(names: list[str], data: st.DataObject) -> None:
    """Whatever the order of the items, and whatever it was before; those of one owner behind those of the other."""
    take = array_taker(Owner, PLACES, names, WANTED)
    for num_owners in (1, 3):
        given_arrays = [{name: np.arange(1 + i) for i, name in enumerate(names)} for _ in range(num_owners)]
        owners = [own([make(name, each[name]) for name in data.draw(st.permutations(names))]) for each in given_arrays]
        found = taken(take, owners, len(names))
        expected = [each[name] for each in given_arrays for name in names]
        assert found is not None
        assert all(one is other for one, other in zip(found, expected, strict=True))


@given(names=NAMES.filter(bool), sent=NAMES)
def test_other_names_are_refused(names: list[str], sent: list[str]) -> None:
    """Also more or fewer of them; and one that comes twice."""
    take = array_taker(Owner, PLACES, names, WANTED)
    found = taken(take, [own([make(name, np.zeros(1)) for name in sent])], len(names))
    assert (found is not None) == (sorted(sent) == sorted(names))
    twice = own([make(name, np.zeros(1)) for name in [names[0], *names[:-1]]])
    assert (taken(take, [twice], len(names)) is None) == (len(names) > 1)


@given(wanted=NAMES.filter(bool), other=NAMES.filter(bool), data=st.data())
def test_owners_that_want_other_names_are_refused(wanted: list[str], other: list[str], data: st.DataObject) -> None:
    """Whatever the order in which the names have come into the set."""
    take = array_taker(Owner, PLACES, ["x"], wanted)
    item = make("x", np.zeros(1))
    good = own([item], wanted=data.draw(st.permutations(wanted)))
    assert taken(take, [good, good], 1) is not None
    assert (taken(take, [good, own([item], wanted=other)], 1) is None) == (sorted(wanted) != sorted(other))
    assert taken(take, [own([item], wanted=())], 1) is None


@pytest.mark.parametrize(
    "array",
    [None, [1.0], 5, np.ma.zeros(2), np.float32(1), np.array(None), np.zeros(0), np.zeros((2, 0))],
    ids=lambda each: f"{type(each).__name__}{np.shape(each)}",
)
def test_items_without_an_array_are_refused(array: Any) -> None:
    """Tensors on a GPU have an array of None; arrays without elements are left to the caller."""
    take = array_taker(Owner, PLACES, ["x", "y"], WANTED)
    good = own([make("x", np.zeros(1)), make("y", np.zeros(1))])
    assert taken(take, [good, own([make("x", np.zeros(1)), make("y", array)])], 2) is None
    assert taken(take, [good, good], 2) is not None


@pytest.mark.parametrize(
    "other", [object(), None, 5, own([make("x", np.zeros(1))], structure("id", "items", "wanted", "last"))]
)
def test_owners_of_other_types_are_refused(other: Any) -> None:
    """Their memory is not read."""
    take = array_taker(Owner, PLACES, ["x"], WANTED)
    assert taken(take, [other], 1) is None
    assert taken(take, [own([make("x", np.zeros(1))]), other], 1) is None


def test_a_null_pointer_is_refused() -> None:
    """In place of an item."""
    take = array_taker(Owner, PLACES, ["x", "y"], WANTED)
    assert taken(take, [own([make("x", np.zeros(1)), None])], 2) is None


def test_arrays_are_counted_as_long_as_they_are_held() -> None:
    """The list holds each of them once, also where it is not completed."""
    take = array_taker(Owner, PLACES, ["x", "y"], WANTED)
    array = np.zeros(3)
    good, bad = (own([make("x", array), make(name, array)]) for name in "yz")
    before = sys.getrefcount(array)
    found = taken(take, [good, good], 2)
    assert sys.getrefcount(array) == before + 4
    assert taken(take, [good, bad], 2) is None
    del found
    assert sys.getrefcount(array) == before


def samples(kind: type, owner: type = Owner) -> tuple[Any, list[tuple[Any, str, NDArray[Any]]]]:
    """An owner and its items, with what they have."""
    each = [(name, np.zeros(1 + i)) for i, name in enumerate(("a", "fifteen letters", "a longer name than these"))]
    items = [(make(name, array, kind), name, array) for name, array in each]
    return own([item for item, *_ in items], owner), items


@pytest.mark.parametrize(
    ("fields", "owner", "places"),
    [
        (("name", "array"), ("items", "wanted"), Places(24, 0, 0, 16)),
        (("array", "name"), ("wanted", "items"), Places(8, 40, 8, 0)),
        (("a", "b", "array", "c", "name", "d"), ("a", "b", "items", "c", "wanted"), Places(48, 16, 32, 16)),
    ],
)
def test_places_are_found(fields: tuple[str, ...], owner: tuple[str, ...], places: Places) -> None:
    """Wherever they are in the content."""
    owner_of_items, items = samples(structure(*fields), structure(*owner))
    assert find_places(owner_of_items, WANTED, items) == places
    assert find_places(owner_of_items, WANTED[::-1], items) == places


def test_places_that_are_not_the_same_in_all_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those of objects written in Python, nor where arrays cannot be read, nor with the wrong names or items."""

    class Plain:
        def __init__(self, name: str, array: NDArray[Any]) -> None:
            self.name, self.array = name, array

    owner, items = samples(Item)
    assert find_places(owner, WANTED, items) == PLACES
    other = structure("array", "name")
    mixed = [items[0], *((make(name, array, other), name, array) for _, name, array in items[1:])]
    assert find_places(own([item for item, *_ in mixed]), WANTED, mixed) is None
    assert find_places(owner, WANTED, [(Plain(name, array), name, array) for _, name, array in items]) is None
    assert find_places(Plain("", np.zeros(1)), WANTED, items) is None
    assert find_places(owner, WANTED, [(item, f"{name}!", array) for item, name, array in items]) is None
    assert find_places(owner, WANTED, [(item, name, array.copy()) for item, name, array in items]) is None
    assert find_places(owner, WANTED, items[::-1]) is None
    assert find_places(owner, WANTED, items[1:]) is None
    assert find_places(owner, WANTED[1:], items) is None
    assert find_places(owner, [*WANTED[1:], "y"], items) is None
    monkeypatch.setattr(module, "can_read_arrays", lambda: False)
    assert find_places(owner, WANTED, items) is None


@pytest.mark.parametrize("part", ["first", "parent", "root parent", "number"])
def test_sets_of_another_layout_are_not_found(part: str) -> None:
    """Of which compiled code would read something else."""
    owner, items = samples(Item)
    nodes, _ = owner.kept_set
    assert find_places(owner, WANTED, items) == PLACES
    if part == "first":
        owner.wanted[2] = owner.wanted[3]
    elif part == "number":
        owner.wanted[4] += 1
    else:
        nodes[int(part == "parent"), 1] += 8
    assert find_places(owner, WANTED, items) is None


def test_a_process_that_may_not_read_its_memory_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without /proc."""

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    owner, items = samples(Item)
    assert find_places(owner, WANTED, items) is None
