"""Inputs of requests in any order, with stand-ins for Triton's tensors: as its stub has them in memory, and others."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

MODULES = ("triton_backend.backend.tensors", "triton_backend.backend.input_tensors")


class Methods:
    """`pb_utils.Tensor`, as far as requests and NumPy's arrays are concerned."""

    num_calls = 0

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self.kept = name, array, np.array(bytearray(name.encode()), np.uint8)

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> Any:
        return cls(name, np.from_dlpack(source))

    def is_cpu(self) -> bool:
        return True

    def name(self) -> str:
        type(self).num_calls += 1
        return self.kept[0]

    def as_numpy(self) -> NDArray[Any]:
        if self.kept[1] is None:
            raise TritonModelError
        return self.kept[1]


class TritonModelError(Exception):
    """`pb_utils.TritonModelException`."""


class InMemory(Methods, ctypes.Structure):
    """Has name and array where it leads to, as the stub's tensors."""

    _fields_ = [("address", ctypes.c_int64), ("length", ctypes.c_int64), ("array", ctypes.py_object)]

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        Methods.__init__(self, name, array)
        self.address, self.length = self.kept[2].ctypes.data, len(self.kept[2])
        self.array = np.array(None) if array is None else array  # as pybind11 has it for a tensor on a GPU


class Lazy(InMemory):
    """Gives another array than the one in its memory for a tensor of a request."""

    def as_numpy(self) -> NDArray[Any]:
        return self.kept[1] if self.kept[0] not in "xyz" else self.kept[1].copy()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type], Any]]:
    """Gives InputTensors of a model with inputs x, y and z, for tensors of this type."""

    def of(tensor: type) -> Any:
        for name in MODULES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        stand_in = SimpleNamespace(Tensor=tensor, TritonModelException=TritonModelError)
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
        from triton_backend.backend.input_tensors import InputTensors

        return InputTensors(["x", "y", "z"])

    yield of
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", [Methods, InMemory, Lazy])
def test_arrays_come_in_the_order_of_the_inputs(reader: Callable[[type], Any], kind: type) -> None:
    """Whatever the order of the tensors."""
    inputs = reader(kind)
    for number, order in enumerate(itertools.permutations("xyz")):
        arrays = {name: np.arange(3) + number for name in order}
        found = inputs.read([kind(name, arrays[name]) for name in order])
        assert len(found) == len(arrays)
        for one, name in zip(found, "xyz", strict=True):
            np.testing.assert_array_equal(one, arrays[name])


def test_methods_are_called_only_for_the_first_request(reader: Callable[[type], Any]) -> None:
    """If its arrays are those in memory; else for all of them."""
    calls = {}
    for kind in (InMemory, Lazy):
        inputs = reader(kind)
        kind.num_calls = 0
        for _ in range(4):
            inputs.read([kind(name, np.zeros(1)) for name in "zyx"])
        calls[kind] = kind.num_calls
    assert calls == {InMemory: 3, Lazy: 12}


@pytest.mark.parametrize("kind", [Methods, InMemory])
@pytest.mark.parametrize("is_first", [True, False])
def test_other_requests_are_not_read(reader: Callable[[type], Any], kind: type, is_first: bool) -> None:
    """With other names, a name that comes twice, or a tensor on a GPU; afterwards, requests are read as before."""
    inputs = reader(kind)
    good = [kind(name, np.zeros(1)) for name in "xyz"]
    assert is_first or inputs.read(good) is not None
    for names in ("xy", "xyw", "xyy", "xyzw", ""):
        assert inputs.read([kind(name, np.zeros(1)) for name in names]) is None
    assert inputs.read([*good[:2], kind("z", None)]) is None
    assert inputs.read(good) is not None
