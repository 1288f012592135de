"""Reads requests that carry only a model's inputs as one list of arrays: the fast path for most requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec
from triton_backend.backend.tensors import knows_numpy
from triton_backend.client.probe import PROBE_PARAMETER

_MAX_ORDERS = 64


class PlainArrays(NamedTuple):
    """Several requests."""

    arrays: list[NDArray[Any]]
    """Views of shared memory, request after request, in the order of the model's inputs."""
    outputs: Collection[str]
    """The outputs that each of them asks for."""


class PlainRequests:
    """Reads requests to one model. Safe to use from several threads."""

    def __init__(self, spec: ModelSpec, *, max_samples: int) -> None:
        """`max_samples`: a request with more is not read. 0: any number is."""
        self._names = tuple(tensor.name for tensor in spec.inputs)
        self._max_samples = max_samples
        # Mapping these over a request's tensors takes three quarters of the time of a loop in Python.
        self._name_of, self._array_of = pb_utils.Tensor.name, pb_utils.Tensor.as_numpy
        self._places: dict[tuple[str, ...], list[int]] = {}
        """The position of each of the model's inputs in requests; Triton chooses the order of inputs."""

    def read(self, requests: Sequence[Any]) -> PlainArrays | None:
        """The arrays of `pb_utils.InferenceRequest`s.

        None: one of them has something that is no array in host memory, not the model's inputs, or too many samples, or
        they do not ask for the same outputs.
        """
        if not knows_numpy():
            return None
        arrays: list[NDArray[Any]] = []
        outputs = requests[0].requested_output_names()
        for request in requests:
            if request.requested_output_names() != outputs or PROBE_PARAMETER in request.parameters():
                return None
            tensors = request.inputs()
            places = self._places_of(tuple(map(self._name_of, tensors)))
            try:
                own = list(map(self._array_of, tensors))
            except pb_utils.TritonModelException:  # one is on a GPU
                return None
            if places is None or (self._max_samples and max(map(_num_samples, own)) > self._max_samples):
                return None
            arrays += map(own.__getitem__, places)
        return PlainArrays(arrays, outputs)

    def _places_of(self, sent: tuple[str, ...]) -> list[int] | None:
        """Where the inputs are in this order; None: they are not the model's."""
        places = self._places.get(sent)
        if places is None and sorted(sent) == sorted(self._names):
            places = [sent.index(name) for name in self._names]
            if len(self._places) < _MAX_ORDERS:
                self._places[sent] = places
        return places


def _num_samples(array: NDArray[Any]) -> int:
    return len(array) if array.ndim else 0
