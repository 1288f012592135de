"""Reads requests that carry only a model's inputs as one list of arrays: the fast path for most requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec
from triton_backend.backend.tensors import arrays_reader
from triton_backend.client.probe import PROBE_PARAMETER

_MAX_ORDERS = 64
PlainArrays: TypeAlias = "tuple[list[NDArray[Any]], Collection[str]]"
"""Several requests: views of shared memory, request after request, in the order of the model's inputs; and the
outputs that each of them asks for.
"""


class PlainRequests:
    """Reads requests to one model. Safe to use from several threads."""

    def __init__(self, spec: ModelSpec, *, max_samples: int) -> None:
        """`max_samples`: a request with more is not read. 0: any number is."""
        self._names = tuple(tensor.name for tensor in spec.inputs)
        self._any_probe = not spec.has_own_inputs
        """Whether probes are answered with other inputs than they carry."""
        self._max_samples = max_samples
        # Mapping these over a request's tensors takes three quarters of the time of a loop in Python.
        self._name_of, self._arrays_of = pb_utils.Tensor.name, arrays_reader()
        self._orders: dict[tuple[str, ...], list[int]] = {}
        """The position of each of the model's inputs in requests; Triton chooses the order of inputs."""

    def read(self, requests: Sequence[Any]) -> PlainArrays | None:
        """What `pb_utils.InferenceRequest`s carry, and ask for.

        None: one of them has something that is no array in host memory, not the model's inputs, or too many samples, or
        they do not ask for the same outputs.
        """
        if self._any_probe and any(PROBE_PARAMETER in each.parameters() for each in requests):
            return None
        arrays: list[NDArray[Any]] = []
        first = requests[0]
        outputs = first.requested_output_names()
        for request in requests:
            if request is not first and request.requested_output_names() != outputs:
                return None
            tensors = request.inputs()
            names = tuple(map(self._name_of, tensors))
            order = None if names == self._names else self._orders.get(names) or self._order_of(names)
            try:
                own = list(self._arrays_of(tensors))
            except pb_utils.TritonModelException:  # one of the tensors is on a GPU
                return None
            if order == [] or (self._max_samples and max(map(_num_samples, own)) > self._max_samples):
                return None
            arrays += own if order is None else map(own.__getitem__, order)
        return arrays, outputs

    def _order_of(self, sent: tuple[str, ...]) -> list[int]:
        """The position of each of the model's inputs among these names; nothing if they are not the model's inputs."""
        if sorted(sent) != sorted(self._names):
            return []
        order = [sent.index(name) for name in self._names]
        if len(self._orders) < _MAX_ORDERS:
            self._orders[sent] = order
        return order


def _num_samples(array: NDArray[Any]) -> int:
    return len(array) if array.ndim else 0
