"""The rows of joined outputs, described for DLPack, as NumPy reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.kernels.array_headers import dtype_addresses
from inference_session.kernels.cpu.arguments import Arguments
from inference_session.kernels.cpu.requests.dlpack import (
    DESCRIBED,
    ELEMENT,
    MANAGED_TENSOR,
    MAX_RANK,
    NO_ROOM,
    NOT_DESCRIBED,
    describe_rows,
)
from inference_session.kernels.records import address_of
from inference_session.platform.dlpack_layout import CPU, KINDS
from inference_session.requests.outputs import JoinedAnswer

DTYPES = [np.dtype(name) for name in ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8")]
ELEMENTS = np.array([(dtype_addresses(dtype), dtype.itemsize, KINDS[dtype.kind]) for dtype in DTYPES], ELEMENT)
MAX_BYTES = 100_000
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def describe(arrays: list[Any], counts: NDArray[np.int64]) -> NDArray[np.void] | None:
    """The records of arrays that stay where they are; None: the kernel refuses."""
    records = np.zeros(len(arrays) * len(counts), MANAGED_TENSOR)
    status = describe_into(records, np.zeros(0, np.uint8), arrays, counts, copies=False)
    assert status in {DESCRIBED, NOT_DESCRIBED}
    return None if status == NOT_DESCRIBED else records


def describe_into(
    records: NDArray[np.void], values: NDArray[np.uint8], arrays: list[Any], counts: NDArray[np.int64], *, copies: bool
) -> int:
    bound = Arguments(id(np.ndarray), MAX_BYTES, ELEMENTS, records, values).bound_to(describe_rows)
    return bound(id(arrays), len(arrays), id(counts), copies)


class Described:
    """A record as an array of another library."""

    def __init__(self, record: NDArray[np.void]) -> None:
        self.record = record
        record["device_type"], record["lanes"] = CPU, 1
        record["shape_address"] = address_of(record) + MANAGED_TENSOR.fields["shape"][1]  # type: ignore[index]

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: object) -> Any:
        return new_capsule(address_of(self.record), b"dltensor", None)


@settings(max_examples=60)
@given(
    outputs=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=4)), min_size=1, max_size=4
    ),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    copies=st.booleans(),
    seed=st.integers(0, 99),
)
def test_each_request_gets_its_rows(outputs: list[Any], counts: list[int], copies: bool, seed: int) -> None:
    """Request after request, in any number of dimensions and of any type, where they are and copied."""
    rng, total = np.random.default_rng(seed), sum(counts)
    arrays = [rng.integers(0, 100, (total, *shape)).astype(dtype) for dtype, shape in outputs]
    names = tuple(map(str, range(len(arrays))))
    answer = JoinedAnswer(names, arrays, np.array(counts))
    wanted = [array.copy() for each in answer.split() for array in each.values()]
    num_bytes = sum(-(-array.nbytes // 64) * 64 for array in arrays) if copies else 0
    records, values = np.zeros(len(wanted), MANAGED_TENSOR), np.zeros(num_bytes, np.uint8)

    assert describe_into(records, values, arrays, answer.counts, copies=copies) == DESCRIBED
    if copies:
        for array in arrays:
            array.fill(0)
    for i, array in enumerate(wanted):
        # Copied, since an array that is left when the records are freed reads its record when it is freed itself.
        found = np.from_dlpack(Described(records[i : i + 1])).copy()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)


class Kind(np.ndarray[Any, Any]):
    """A subclass of arrays, whose elements may mean something else."""


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
REFUSED = {
    "column by column": np.asfortranarray(ROWS),
    "every second row": np.arange(12, dtype=np.float32).reshape(6, 2)[::2],
    "other byte order": ROWS.astype(">f4"),
    "strings": ROWS.astype(object),
    "no number of rows": np.array(1.0),
    "fewer rows": ROWS[:2],
    "more rows": np.zeros((4, 2), np.float32),
    "empty rows": np.zeros((3, 0), np.float32),
    "too many dimensions": np.zeros((3,) + (1,) * MAX_RANK),
    "too large": np.zeros((3, MAX_BYTES // 6 + 1), np.float32),
    "of a subclass": ROWS.view(Kind),
    "no array": [1.0, 2.0, 3.0],
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_arrays_are_refused(case: str) -> None:
    assert describe([ROWS], np.array([1, 2])) is not None
    assert describe([ROWS, REFUSED[case]], np.array([1, 2])) is None


def test_values_that_have_no_room_are_not_copied() -> None:
    """Room for the second array would end behind the memory."""
    arrays, counts = [ROWS, ROWS], np.array([3])
    records = np.zeros(2, MANAGED_TENSOR)
    for num_bytes, wanted in ((64 + ROWS.nbytes, DESCRIBED), (64 + ROWS.nbytes - 1, NO_ROOM), (0, NO_ROOM)):
        values = np.zeros(num_bytes + 1, np.uint8)
        assert describe_into(records, values[:-1], arrays, counts, copies=True) == wanted
        assert not values[-1]


def test_batches_without_samples_are_refused() -> None:
    assert describe([ROWS[:0]], np.array([0, 0])) is None
