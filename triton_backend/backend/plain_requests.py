"""Reads requests that carry only a model's inputs as one list of arrays: the fast path for most requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from inference_session.model_spec import ModelSpec
from triton_backend.backend.request_reader import RequestReader
from triton_backend.client.probe import PROBE_PARAMETER

PlainArrays: TypeAlias = "tuple[list[NDArray[Any]], Collection[str]]"
"""Several requests: views of shared memory, request after request, in the order of the model's inputs; and the
outputs that each of them asks for.
"""


class PlainRequests:
    """Reads requests to one model. Safe to use from several threads."""

    def __init__(self, spec: ModelSpec, *, max_samples: int) -> None:
        """`max_samples`: a request with more is not read. 0: any number is."""
        self._reader = RequestReader([tensor.name for tensor in spec.inputs])
        self._any_probe = not spec.has_own_inputs
        """Whether probes are answered with other inputs than they carry."""
        self._max_samples = max_samples

    def read(self, requests: Sequence[Any]) -> PlainArrays | None:
        """What `pb_utils.InferenceRequest`s carry, and ask for.

        None: one of them has something that is no array in host memory, not the model's inputs, or too many samples, or
        they do not ask for the same outputs.
        """
        if self._any_probe and any(PROBE_PARAMETER in each.parameters() for each in requests):
            return None
        plain = self._reader.read(requests)
        if plain is not None and self._max_samples and max(map(_num_samples, plain[0])) > self._max_samples:
            return None
        return plain


def _num_samples(array: NDArray[Any]) -> int:
    return len(array) if array.ndim else 0
