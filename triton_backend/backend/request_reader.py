"""The inputs of requests as arrays in the order of the model's inputs, and the outputs that they ask for.

Triton chooses the order of tensors. With 26 inputs, to make objects of them, and to ask these for names and arrays,
takes a fifth of the time of a request of 64 samples in the stub; the names of the outputs take 4 microseconds. So
compiled code reads all of it from the stub's memory, if it is as in a request that is made to find out. What it reads
is compared with what the methods of requests and tensors give, once for all requests that ask for the same outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.execution.staging.base import Arrays
from inference_session.kernels.cpu.requests.named_arrays import Places, array_taker, compile_kernels, find_places
from triton_backend.backend.tensors import arrays_reader, knows_numpy
from triton_backend.client.probe import PROBE_PARAMETER

_MAX_ORDERS, _MAX_TAKERS = 64, 8
PlainArrays: TypeAlias = "tuple[Arrays, Collection[str]]"
"""Several requests: views of shared memory, request after request, in the order of the model's inputs; and the
outputs that each of them asks for.
"""


class RequestReader:
    """Reads requests that carry only a model's inputs, as most do. Safe to use from several threads."""

    def __init__(self, names: Sequence[str], *, max_samples: int = 0, reads_probes: bool = True) -> None:
        """Prepare for requests with these inputs.

        Args:
            names: of the model's inputs.
            max_samples: a request with more is not read. 0: any number is.
            reads_probes: whether probes are read like other requests; they are not where other inputs than theirs are
                computed.
        """
        self._names = tuple(names)
        self._max_samples, self._reads_probes = max_samples, reads_probes
        self._places = _places() if knows_numpy() else None
        """None: the memory of requests is not as expected."""
        self._takers: list[tuple[Callable[[int, int, int], int], tuple[str, ...]]] = []
        """`take_arrays` for requests that ask for certain outputs, and these outputs."""
        # Mapping these over a request's tensors takes three quarters of the time of a loop in Python.
        self._name_of, self._arrays_of = pb_utils.Tensor.name, arrays_reader()
        self._orders: dict[tuple[str, ...], list[int]] = {}
        """The position of each of the model's inputs in requests."""

    def read(self, requests: Sequence[Any]) -> PlainArrays | None:
        """What `pb_utils.InferenceRequest`s carry, and ask for.

        None: one of them has something that is no array in host memory, not just the model's inputs, or too many
        samples, or they do not ask for the same outputs.
        """
        if not self._reads_probes and any(PROBE_PARAMETER in each.parameters() for each in requests):
            return None
        plain: PlainArrays | None
        for take, outputs in self._takers if type(requests) is list else ():  # they read a list's memory
            arrays: list[Any] = [None] * (len(requests) * len(self._names))
            if take(id(requests), len(requests), id(arrays)):
                plain = arrays, outputs
                break
        else:
            plain = self._read_by_methods(requests)
            if plain is not None:
                self._add_taker(list(requests), *plain)
        if self._max_samples and plain is not None and max(map(_num_samples, plain[0])) > self._max_samples:
            return None
        return plain

    def _add_taker(self, requests: list[Any], arrays: Arrays, outputs: Collection[str]) -> None:
        """Read such requests from memory from now on. No requests are, if these have other arrays there."""
        if self._places is None or len(self._takers) == _MAX_TAKERS:
            return
        take = array_taker(pb_utils.InferenceRequest, self._places, self._names, outputs)
        found: list[Any] = [None] * len(arrays)
        if take(id(requests), len(requests), id(found)) and all(map(operator.is_, found, arrays)):
            self._takers.append((take, tuple(outputs)))
        elif all(array.size for array in arrays):  # it does not take arrays without elements
            self._places = None
            self._takers.clear()

    def _read_by_methods(self, requests: Sequence[Any]) -> PlainArrays | None:
        arrays: Arrays = []
        outputs = requests[0].requested_output_names()
        for request in requests:
            if request is not requests[0] and request.requested_output_names() != outputs:
                return None
            own = self._arrays_in_order(request.inputs())
            if own is None:
                return None
            arrays += own
        return arrays, outputs

    def _arrays_in_order(self, tensors: list[Any]) -> Arrays | None:
        names = tuple(map(self._name_of, tensors))
        order = None if names == self._names else self._orders.get(names) or self._order_of(names)
        if order == []:
            return None
        try:
            arrays = list(self._arrays_of(tensors))
        except pb_utils.TritonModelException:  # one of the tensors is on a GPU
            return None
        return arrays if order is None else list(map(arrays.__getitem__, order))

    def _order_of(self, sent: tuple[str, ...]) -> list[int]:
        """The position of each of the model's inputs among these names; nothing if they are not the model's inputs."""
        if sorted(sent) != sorted(self._names):
            return []
        order = [sent.index(name) for name in self._names]
        if len(self._orders) < _MAX_ORDERS:
            self._orders[sent] = order
        return order


@cache
def _places() -> Places | None:
    """Where a request has its tensors and the names of its outputs, and where tensors have their names and arrays."""
    names = "short", "exactly fifteen", "longer than a string that has no memory of its own"
    tensors = [pb_utils.Tensor(name, np.arange(6.0).astype(kind)) for name, kind in zip(names, "qfi", strict=True)]
    try:
        request = pb_utils.InferenceRequest(model_name="probe", requested_output_names=list(names), inputs=tensors)
    except Exception:  # noqa: BLE001  whatever it is, requests can be read without it
        return None
    items = [(tensor, name, tensor.as_numpy()) for tensor, name in zip(tensors, names, strict=True)]
    places = find_places(request, names, items)
    if places is not None:
        compile_kernels()  # else the first request waits for it
    return places


def _num_samples(array: NDArray[Any]) -> int:
    return len(array) if array.ndim else 0
