"""Tensors of the outputs of several batches, with a stand-in for Triton's module that reads capsules as its stub does:
when the tensors are sent.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.kernels.cpu.requests.dlpack import MANAGED_TENSOR
from inference_session.requests.outputs import JoinedAnswer

MODULES = ("triton_backend.backend.tensors", "triton_backend.backend.output_tensors")
pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Tensor:
    """`pb_utils.Tensor`."""

    def __init__(self, name: str, source: Any) -> None:
        self._name, self._source = name, source

    @classmethod
    def from_dlpack(cls, name: str, source: Any) -> Tensor:
        return cls(name, source)

    def name(self) -> str:
        return self._name

    def is_cpu(self) -> bool:
        return True

    def as_numpy(self) -> NDArray[Any]:
        """What is in the memory now."""
        if hasattr(self._source, "__dlpack__"):
            return np.from_dlpack(self._source)
        record = _at(pointer_of(self._source, b"dltensor") or 0, MANAGED_TENSOR, 1)[0]
        shape = record["shape"][: record["rank"]]
        dtype = np.dtype(f"{'iuf'[record['kind']]}{record['bits'] // 8}")
        return _at(int(record["data"]), dtype, int(np.prod(shape))).reshape(shape)


def _at(address: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    values: Any = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(values, dtype)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(Tensor=Tensor))
    import triton_backend.backend.output_tensors as imported

    yield imported
    for name in MODULES:
        del sys.modules[name]


@pytest.mark.parametrize("size", [4, 3000, 40_000])
def test_tensors_keep_their_values_until_the_next_batch(module: Any, size: int) -> None:
    """Although the arrays of the batch are written over; of few samples, and of more than there is room for."""
    tensors = module.OutputTensors()
    for i, num_requests in enumerate((20, 90, 30)):
        counts = np.full(num_requests, size // num_requests)
        counts[0] += size - counts.sum()
        arrays: list[NDArray[Any]] = [
            np.arange(size * 2, dtype=np.float32).reshape(size, 2) + i,
            np.arange(size) - i,
        ]
        answer = JoinedAnswer(("y", "z"), arrays, counts)
        wanted = [array for each in answer.copied().split() for array in each.values()]
        made = list(tensors.of(answer))
        for array in arrays:
            array.fill(0)
        assert [tensor.name() for tensor in made] == ["y", "z"] * num_requests
        for tensor, array in zip(made, wanted, strict=True):
            if len(array):
                assert tensor.as_numpy().dtype == array.dtype
                np.testing.assert_array_equal(tensor.as_numpy(), array)


def test_outputs_without_a_description_are_left_to_the_caller(module: Any) -> None:
    tensors = module.OutputTensors()
    for counts in (np.array([1, 1]), np.full(20, 2000)):  # of a batch that has room, and of one that has none
        numbers, strings = np.zeros((counts.sum(), 2), np.float32), np.full(counts.sum(), "a", object)
        assert tensors.of(JoinedAnswer(("y",), [numbers], counts)) is not None
        assert tensors.of(JoinedAnswer(("y", "z"), [numbers, strings], counts)) is None
