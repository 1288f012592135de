"""Arrays over DLPack's capsules, as NumPy makes them."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.kernels.cpu.requests import capsules as module
from inference_session.kernels.cpu.requests.capsules import capsule_wrapper
from inference_session.kernels.cpu.requests.dlpack import MANAGED_TENSOR
from inference_session.kernels.records import address_of
from inference_session.platform.dlpack_layout import CPU, CUDA_HOST, KINDS

DTYPES = [np.dtype(name) for name in ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?")]
CUDA = 2
Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, Destructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Exported:
    """Records that describe arrays, and capsules that lead to them; counts the capsules that were freed."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self.num_freed = 0
        self.records = np.zeros(len(arrays), MANAGED_TENSOR)
        self._arrays, self._destructor = arrays, Destructor(self._free)
        for i, (record, array) in enumerate(zip(self.records, arrays, strict=True)):
            record["data"], record["rank"] = array.ctypes.data, array.ndim
            record["kind"], record["bits"] = KINDS[array.dtype.kind], 8 * array.itemsize
            record["device_type"], record["lanes"] = CPU, 1
            record["shape"][: array.ndim] = array.shape
            place: int = MANAGED_TENSOR.fields["shape"][1]  # type: ignore[index]
            record["shape_address"] = address_of(self.records[i : i + 1]) + place

    def _free(self, _: int) -> None:
        self.num_freed += 1

    def capsules(self, name: bytes = b"dltensor") -> list[Any]:
        """A capsule for each record."""
        self._name = name
        size = MANAGED_TENSOR.itemsize
        return [
            new_capsule(address_of(self.records) + size * i, name, self._destructor) for i in range(len(self.records))
        ]


@pytest.fixture(scope="module")
def wrap() -> Callable[[int, int], int]:
    found = capsule_wrapper(KINDS, (CPU, CUDA_HOST))
    assert found is not None
    return found


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=30
    ),
    offset=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_arrays_are_those_that_were_exported(wrap: Any, kinds: list[Any], offset: int, seed: int) -> None:
    """Of any type and number of dimensions, also where they do not begin at a multiple of their size."""
    rng = np.random.default_rng(seed)
    arrays = []
    for dtype, shape in kinds:
        values = rng.integers(0, 100, shape).astype(dtype)
        memory = np.zeros(values.nbytes + offset, np.uint8)
        arrays.append(np.ndarray(values.shape, dtype, memory, offset))
        arrays[-1][...] = values
    exported = Exported(arrays)
    found = exported.capsules()

    assert wrap(id(found), len(found)) == len(arrays)
    for array, wanted in zip(found, arrays, strict=True):
        assert (type(array), array.dtype, array.shape) == (np.ndarray, wanted.dtype, wanted.shape)
        assert not wanted.size or array.ctypes.data == wanted.ctypes.data
        assert array.flags.c_contiguous
        assert array.flags.aligned == wanted.flags.aligned
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, wanted)


def test_an_array_keeps_its_capsule_as_long_as_it_lives(wrap: Any) -> None:
    exported = Exported([np.arange(6).reshape(2, 3), np.ones(4, np.float32)])
    found = exported.capsules()
    wrap(id(found), 2)
    assert [sys.getrefcount(array) for array in found] == [3, 3]  # the list, the loop and the argument
    view = found[0][1:]
    del found
    gc.collect()
    assert exported.num_freed == 1
    assert view.tolist() == [[3, 4, 5]]
    del view
    gc.collect()
    assert exported.num_freed == 2


def test_types_are_not_used_up(wrap: Any) -> None:
    """NumPy's types of elements are counted objects."""
    exported = Exported([np.arange(6)])
    before = sys.getrefcount(np.dtype(np.int64))
    for _ in range(100):
        found = exported.capsules()
        wrap(id(found), 1)
        del found
    assert abs(sys.getrefcount(np.dtype(np.int64)) - before) < 10


MANY_SIZES = np.ones(65, np.int64)
REFUSED: dict[str, dict[str, Any]] = {
    "on a GPU": {"device_type": CUDA},
    "several numbers per element": {"lanes": 2},
    "complex": {"kind": 5},
    "of 4 bits": {"bits": 4},
    "too many dimensions": {"rank": len(MANY_SIZES), "shape_address": address_of(MANY_SIZES)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_tensors_stay_capsules(wrap: Any, case: str) -> None:
    exported = Exported([np.arange(4), np.arange(6)])
    for name, value in REFUSED[case].items():
        exported.records[1][name] = value
    found = exported.capsules()
    assert wrap(id(found), 2) == 1
    assert found[0].tolist() == [0, 1, 2, 3]
    assert type(found[1]).__name__ == "PyCapsule"


def test_strides_are_those_of_a_contiguous_tensor_or_refused(wrap: Any) -> None:
    for strides, is_read in (([3, 1], True), ([1, 2], False), ([6, 1], False)):
        memory = np.array(strides)
        exported = Exported([np.arange(6).reshape(2, 3)])
        exported.records["strides_address"] = address_of(memory)
        found = exported.capsules()
        assert wrap(id(found), 1) == is_read


def test_pinned_memory_and_offsets_are_read(wrap: Any) -> None:
    array = np.arange(6)
    exported = Exported([array[:4]])
    exported.records["device_type"], exported.records["byte_offset"] = CUDA_HOST, 16
    found = exported.capsules()
    assert wrap(id(found), 1) == 1
    assert found[0].tolist() == [2, 3, 4, 5]


def test_other_objects_are_refused(wrap: Any) -> None:
    exported = Exported([np.arange(6)])
    for items in (exported.capsules(b"used_dltensor"), [1], [np.arange(3)], [None]):
        assert wrap(id(items), 1) == 0


def test_nothing_is_called_where_python_is_not_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_read_arrays", lambda: False)
    assert capsule_wrapper(KINDS, (CPU, CUDA_HOST)) is None
