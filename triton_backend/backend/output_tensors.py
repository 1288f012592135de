"""The outputs of a batch as tensors of the Python backend, without NumPy or Python per tensor.

The stub's constructor for NumPy's arrays compares a dtype with up to 13 others, each of which it looks up by name: a
tensor takes 2.6 microseconds. From a DLPack capsule it takes 1.6, although the stub copies the values once more. A stub
that does not know NumPy 2 takes capsules only, and to make one in Python takes 5 microseconds more. So compiled code
copies and describes all tensors of a batch at once, in records to which capsules lead that are made once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.kernels.array_headers import can_read_arrays, dtype_addresses
from inference_session.kernels.cpu.arguments import Arguments
from inference_session.kernels.cpu.requests.dlpack import ELEMENT, MANAGED_TENSOR, NO_ROOM, NOT_DESCRIBED, describe_rows
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import address_of
from inference_session.platform.dlpack_layout import CPU, KINDS
from inference_session.requests.outputs import JoinedAnswer
from triton_backend.backend.tensors import knows_numpy, read_array

_MAX_BYTES = 16 << 10
"""The most bytes of a tensor: copying a larger one takes longer than the stub's constructor."""
_ANY_SIZE = 1 << 40
"""For stubs that do not know this NumPy: they copy the values of every tensor."""
_ARRAY_TYPE = id(np.ndarray)
_FIRST_TENSORS = 64
_VALUE_BYTES = 1 << 18
"""Room for the values of a thread's tensors, to which compiled code copies them. NumPy copies those that do not fit."""

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_NAME = ctypes.c_char_p(b"dltensor")


class OutputTensors:
    """Makes the tensors of a thread's batches. They use memory of ours until it makes those of the next batch."""

    def __init__(self) -> None:
        self._from_dlpack = pb_utils.Tensor.from_dlpack
        self._elements = _elements()
        self._max_bytes = _MAX_BYTES if knows_numpy() else _ANY_SIZE
        self._all_records: list[NDArray[np.void]] = []
        """Kept for good: tensors that were sent and not destroyed yet may still point to any of them."""
        self._values = np.empty(_VALUE_BYTES, np.uint8)
        self._answer: JoinedAnswer | None = None
        """The last one that had no room there."""
        self._make_room(_FIRST_TENSORS)

    def of(self, answer: JoinedAnswer) -> Iterator[Any] | None:
        """A `pb_utils.Tensor` for each output of each request, one request after the other; None: not of these.

        The tensors have the values in memory of their own: that of the answer is free when the call returns.
        """
        arrays, counts = answer.arrays, answer.counts
        num = len(arrays) * len(counts)
        if num > len(self._capsules):
            self._make_room(max(num, 2 * len(self._capsules)))
        status = self._describe(id(arrays), len(arrays), id(counts), True)
        if status == NO_ROOM:
            self._answer = answer = answer.copied()
            status = self._describe(id(answer.arrays), len(arrays), id(counts), False)
        if status == NOT_DESCRIBED:
            return None
        return map(self._from_dlpack, itertools.cycle(answer.names), self._capsules[:num])

    def _make_room(self, num_tensors: int) -> None:
        records = np.zeros(num_tensors, MANAGED_TENSOR)
        addresses = address_of(records) + MANAGED_TENSOR.itemsize * np.arange(num_tensors)
        records["device_type"], records["lanes"], records["deleter"] = CPU, 1, _no_effect()
        records["shape_address"] = addresses + MANAGED_TENSOR.fields["shape"][1]  # type: ignore[index]
        # The stub renames a capsule, and takes it again by whatever name it has.
        capsules = [_new_capsule(address, _NAME, None) for address in addresses.tolist()]
        arguments = Arguments(_ARRAY_TYPE, self._max_bytes, self._elements, records, self._values)
        describe = arguments.bound_to(of_ints(describe_rows))
        self._all_records.append(records)
        # Both of them together: after a MemoryError, capsules still point to the records that are written.
        self._describe, self._capsules = describe, capsules


class ThreadTensors(threading.local):
    """What makes the tensors of a thread's batches."""

    def __init__(self) -> None:
        self.tensors = OutputTensors() if can_make_tensors() else None
        """None: the stub or NumPy is not as expected."""


@functools.cache
def can_make_tensors() -> bool:
    """Whether tensors are as their arrays, also when capsules are used again."""
    try:
        return can_read_arrays() and _are_as_arrays(OutputTensors())
    except Exception:  # noqa: BLE001  stubs raise errors of several types for capsules that they do not take
        return False


def _are_as_arrays(tensors: OutputTensors) -> bool:
    for begin in (0, 100):
        arrays = [np.arange(begin, begin + 6, dtype=np.int32), np.arange(begin, begin + 12.0).reshape(6, 2)]
        answer = JoinedAnswer(("first", "second"), arrays, np.array([2, 4]))
        made = tensors.of(answer)
        wanted = [item for each in answer.split() for item in each.items()]
        if made is None or not all(itertools.starmap(_is_same, zip(made, wanted, strict=True))):
            return False
    return True


def _is_same(tensor: Any, wanted: tuple[str, NDArray[Any]]) -> bool:
    name, array = wanted
    found = read_array(tensor)
    return tensor.name() == name and found.dtype == array.dtype and np.array_equal(found, array)


def _elements() -> NDArray[np.void]:
    """ELEMENT records of the types that DLPack and Triton know, the most frequent one first."""
    dtypes = [np.dtype(name) for name in ("f4", "i8", "f8", "i4", "f2", "i2", "i1", "u1", "u2", "u4", "u8", "?")]
    rows = [(dtype_addresses(dtype), dtype.itemsize, KINDS[dtype.kind]) for dtype in dtypes]
    return np.array(rows, ELEMENT)


def _no_effect() -> int:
    """The address of a C function that does nothing with the address of a record: they are ours, and stay."""
    return ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value or 0
