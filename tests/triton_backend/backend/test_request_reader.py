"""Inputs of requests in any order, and outputs, with stand-ins for Triton's requests: in memory as its own, or not."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.kernels.cpu.requests import named_arrays
from inference_session.kernels.machine_code import of_ints
from tests.testing.name_sets import insert_all
from triton_backend.client.probe import PROBE_PARAMETER

MODULES = ("triton_backend.backend.tensors", "triton_backend.backend.request_reader")


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
        array = super().as_numpy()
        return array.copy() if self.kept[0] in "xyz" else array


class RequestMethods:
    """`pb_utils.InferenceRequest`, as far as its inputs and outputs are concerned."""

    num_calls = 0

    def __init__(self, *, inputs: list[Any], requested_output_names: list[str], **_: object) -> None:
        self.tensors, self.outputs = inputs, set(requested_output_names)
        self.sent: dict[str, Any] = {}

    def inputs(self) -> list[Any]:
        type(self).num_calls += 1
        return list(self.tensors)

    def parameters(self) -> dict[str, Any]:
        return self.sent

    def requested_output_names(self) -> set[str]:
        type(self).num_calls += 1
        return self.outputs


class RequestInMemory(RequestMethods, ctypes.Structure):
    """Has its tensors and a set of names where it leads to, as the stub's requests."""

    _fields_ = [("id", ctypes.c_int64), ("items", ctypes.c_int64 * 2), ("wanted", ctypes.c_int64 * 5)]

    def __init__(self, *, inputs: list[Any], requested_output_names: list[str], **_: object) -> None:
        RequestMethods.__init__(self, inputs=inputs, requested_output_names=requested_output_names)
        self.pointers = np.array([(ctypes.addressof(each), 1) for each in inputs], np.int64)
        self.items[:] = self.pointers.ctypes.data, self.pointers.ctypes.data + self.pointers.nbytes
        self.kept = insert_all(self, requested_output_names)


class Refused(RequestInMemory):
    """Is made by Triton only."""

    def __init__(self, *, model_name: str = "", **arguments: Any) -> None:
        if model_name:
            raise TypeError(model_name)
        super().__init__(**arguments)


KINDS = {"methods": (Methods, RequestMethods), "memory": (InMemory, RequestInMemory), "lazy": (Lazy, RequestInMemory)}
"""The types of tensors and of their requests."""
KINDS |= {"lazy request": (InMemory, RequestMethods), "refused": (InMemory, Refused)}


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Gives a RequestReader of a model with inputs x, y and z, for tensors and requests of these types."""

    def of(kind: str, **options: Any) -> Any:
        for name in MODULES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        tensor, request = KINDS[kind]
        stand_in = SimpleNamespace(Tensor=tensor, InferenceRequest=request, TritonModelException=TritonModelError)
        monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
        from triton_backend.backend.request_reader import RequestReader

        return RequestReader(["x", "y", "z"], **options)

    yield of
    for name in MODULES:
        sys.modules.pop(name, None)


def request_of(kind: str, arrays: Mapping[str, Any], outputs: Sequence[str] = ("first", "second")) -> Any:
    """A request with these inputs, in this order, for these outputs."""
    tensor, request = KINDS[kind]
    tensors = [tensor(name, array) for name, array in arrays.items()]
    return request(inputs=tensors, requested_output_names=list(outputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_requests", [1, 2])
def test_arrays_come_in_the_order_of_the_inputs(reader: Callable[..., Any], kind: str, num_requests: int) -> None:
    """Whatever the order of the tensors, request after request; with the outputs that all of them ask for."""
    read = reader(kind).read
    for number, order in enumerate([*itertools.permutations("xyz"), "xyz"]):
        given = [{name: np.arange(3) + number + 10 * i for name in order} for i in range(num_requests)]
        outputs = [["first", "second"], ["second"]][number % 3 // 2]
        requests = [request_of(kind, arrays, outputs) for arrays in given]
        arrays, found = read(requests if number % 2 else tuple(requests))
        expected = [arrays[name] for arrays in given for name in "xyz"]
        assert sorted(found) == outputs
        for one, other in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_methods_are_called_only_for_the_first_requests(reader: Callable[..., Any]) -> None:
    """To each set of outputs, if memory has what the methods give; else for all requests."""
    calls = {}
    for kind, (tensor, request) in KINDS.items():
        read = reader(kind).read
        tensor.num_calls = request.num_calls = 0
        for outputs in ["ab", "a", "b", "b", "a", "ba"]:
            read([request_of(kind, dict.fromkeys("zyx", np.zeros(1)), outputs)])
        calls[kind] = tensor.num_calls, request.num_calls
    assert calls.pop("memory") == (9, 6)
    assert set(calls.values()) == {(18, 12)}


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_waits_for_a_compiler(
    reader: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new machine, what reads memory is compiled before the first request, where it will be used."""
    compiled: list[object] = []
    monkeypatch.setattr(named_arrays, "of_ints", lambda kernel: compiled.append(kernel) or of_ints(kernel))
    read = reader(kind).read
    before = list(compiled)
    read([request_of(kind, dict.fromkeys("xyz", np.zeros(1)))])
    assert set(compiled) == set(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_first", [True, False])
def test_other_requests_are_not_read(reader: Callable[..., Any], kind: str, is_first: bool) -> None:
    """With other names, a name that comes twice, a tensor on a GPU, or other outputs than the first; afterwards,
    requests are read as before.
    """
    read = reader(kind).read
    tensor, request = KINDS[kind]
    arrays = dict.fromkeys("xyz", np.zeros(1))
    good = request_of(kind, arrays)
    assert is_first or read([good]) is not None
    for names in ("xy", "xyw", "xyy", "xyzw", ""):
        tensors = [tensor(name, np.zeros(1)) for name in names]
        assert read([good, request(inputs=tensors, requested_output_names=["first", "second"])]) is None
    assert read([request_of(kind, {**arrays, "z": None}), good]) is None
    assert read([good, request_of(kind, arrays, ["first"])]) is None
    assert read([good]) is not None


@pytest.mark.parametrize("kind", ["methods", "memory"])
def test_arrays_without_elements_are_read(reader: Callable[..., Any], kind: str) -> None:
    """By the methods, before and after others that are in memory."""
    read = reader(kind).read
    for size in (0, 1, 0, 1):
        arrays, _ = read([request_of(kind, dict.fromkeys("xyz", np.zeros(size)))])
        assert [len(array) for array in arrays] == [size] * 3


@pytest.mark.parametrize("kind", ["methods", "memory"])
def test_requests_with_too_many_samples_are_not_read(reader: Callable[..., Any], kind: str) -> None:
    """Nor several of which one has too many."""
    read = reader(kind, max_samples=2).read
    requests = [request_of(kind, dict.fromkeys("xyz", np.zeros((size, 5)))) for size in (2, 3)]
    for _ in range(2):
        assert read(requests[:1]) is not None
        assert read(requests[1:]) is None
        assert read(requests) is None


@pytest.mark.parametrize("kind", ["methods", "memory"])
def test_probes_are_not_read(reader: Callable[..., Any], kind: str) -> None:
    """Where they are answered with other inputs than they carry."""
    probe, other = (request_of(kind, dict.fromkeys("xyz", np.zeros(2))) for _ in range(2))
    probe.sent[PROBE_PARAMETER] = True
    for reads_probes in (True, False):
        read = reader(kind, reads_probes=reads_probes).read
        for _ in range(2):
            assert read([other]) is not None
            assert (read([other, probe]) is not None) == reads_probes
