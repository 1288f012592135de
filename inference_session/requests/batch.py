"""Requests: checked one by one, joined into one batch, split again.

A *layout* says how a request carries its samples; tensor_layout.py has the plain one, requests/hugectr_layout.py
those of HugeCTR and HPS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inference_session.config import DEFAULT_MAX_KEYS
from inference_session.errors import ConfigurationError, InvalidRequestError
from inference_session.model_spec import SESSION_FILE, ModelSpec, NamedArrays
from inference_session.requests.outputs import Answer, Outputs


class Request(NamedTuple):
    """A request: arrays by the names of inputs, and the names of the outputs that it asks for (None: all)."""

    inputs: NamedArrays
    outputs: Sequence[str] | None = None


class RaggedBags(NamedTuple):
    """Bags of different lengths: bag i is `values[begins[i]:ends[i]]`; `shape` is the shape of the bags."""

    values: NDArray[Any]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    shape: tuple[int, ...]
    num_keys: int
    """Keys in all bags together."""


Part: TypeAlias = "NDArray[Any] | RaggedBags"


class CheckedRequest(NamedTuple):
    """A request known to be well-formed."""

    inputs: Mapping[str, Part]
    outputs: Sequence[str]
    num_samples: int
    shapes: Hashable
    """Requests with equal shapes may be joined."""
    num_candidates: NDArray[np.int64] | None = None
    """For each context, where inputs of the context are given once for several samples."""

    @property
    def num_contexts(self) -> int:
        """Contexts of a request to a model with context inputs: an ordinary request has one for each of its samples."""
        return self.num_samples if self.num_candidates is None else len(self.num_candidates)


class JoinedBatch:
    """The arrays of several requests, joined as if they were one.

    What the networks read is joined when they ask for it. Keys of look-ups stay in parts, one per request, because
    the look-up gathers the keys of all tables at once.
    """

    def __init__(self, parts: dict[str, list[Part]], num_samples: int, shapes: Hashable) -> None:
        self.num_samples = num_samples
        self.shapes = shapes
        """CheckedRequest.shapes, which all requests have in common."""
        self.staged: list[StagedValues] = []
        """The memory that a look-up of the batch reads, kept alive until the batch is answered."""
        self.copies: list[Callable[[], object]] = []
        """Copy vectors of the look-up to where the network reads them, before it does."""
        self.output_rows: NDArray[np.int64] | None = None
        """The row of each sample in the outputs, where other rows lie between them. None: row i is that of sample i."""
        self._parts = parts

    @classmethod
    def of(cls, requests: Sequence[CheckedRequest]) -> JoinedBatch:
        """A batch of the inputs of these requests, unchanged."""
        names = requests[0].inputs
        parts = {name: [request.inputs[name] for request in requests] for name in names}
        return cls(parts, sum([request.num_samples for request in requests]), requests[0].shapes)

    def copy(self) -> JoinedBatch:
        """Another batch of the same arrays."""
        return JoinedBatch({name: [*parts] for name, parts in self._parts.items()}, self.num_samples, self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    @property
    def is_on_host(self) -> bool:
        """Whether all inputs are in host memory, rather than in a caller's memory on a GPU."""
        return all(isinstance(part, (np.ndarray, RaggedBags)) for parts in self._parts.values() for part in parts)

    def in_order(self, outputs: Answer) -> Answer:
        """Select the rows of the samples, and leave out rows that only fill up a block."""
        if self.output_rows is None:
            return outputs
        return {name: array[self.output_rows] for name, array in outputs.items()}

    def parts(self, name: str) -> list[Part]:
        """The values that the requests sent under that name."""
        return self._parts[name]

    def array(self, name: str) -> NDArray[Any]:
        """The same as one array [rows of all requests, …]; the array of a single request is not copied."""
        parts = self._parts[name]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]  # type: ignore[arg-type]  # only bags of keys are ragged
        return parts[0]  # type: ignore[return-value]

    def add(self, arrays: NamedArrays) -> None:
        """Add arrays by name, [rows of all requests, …], that were computed for the whole batch."""
        for name, array in arrays.items():
            self._parts[name] = [array]

    def replace(self, name: str, parts: list[Part]) -> None:
        """Replace the values of that name by another form of them."""
        self._parts[name] = parts


class StagedValues(NamedTuple):
    """Memory that holds a batch's values of these names, concatenated. No names: what was computed from others."""

    names: tuple[str, ...]
    array: NDArray[Any]

    def fill(self, batch: JoinedBatch) -> None:
        """Overwrite the memory with the values of another batch of the same shapes."""
        parts: list[Any] = [part for name in self.names for part in batch.parts(name)]
        if not self.array.flags.c_contiguous:  # a matrix that is stored column by column, or columns of one
            np.concatenate([part.reshape(-1, self.array.shape[1]) for part in parts], out=self.array)
        elif len(parts) == 1:
            self.array.reshape(-1)[:] = parts[0].reshape(-1)
        else:
            np.concatenate(parts, axis=None, out=self.array.reshape(-1), casting="same_kind")


class RequestLayout(ABC):
    """How requests of one model carry their samples (requests/layouts.py)."""

    has_network = True
    """Whether a dense network computes the answer. If not, the answer consists of the vectors."""
    keys_follow_inputs = False
    """Whether the keys of look-ups are inputs of the model, so that their shapes follow from those of the requests."""

    def __init__(self, spec: ModelSpec, outputs: Outputs, *, network_inputs: frozenset[str], max_elements: int) -> None:  # noqa: ARG002
        """Derive the form of requests from the model.

        Args:
            spec: the model.
            outputs: what clients may ask for.
            network_inputs: what networks read, in addition to the vectors.
            max_elements: elements of one input of a request, at most.
        """
        self.batched = spec.batched
        """Whether the first dimension of inputs and outputs counts samples."""
        self.outputs = outputs
        self.max_elements = max_elements
        self.values: dict[str, str] = {}
        """The names and NumPy types of what a checked request holds."""

    @abstractmethod
    def check(self, request: Request) -> CheckedRequest:
        """Check a request. InvalidRequestError names the input, what was found, and what is expected."""

    @abstractmethod
    def generated(self, num_samples: int) -> Request:
        """A request of zeros to warm up with, of this many samples where the number is free."""

    def join(self, requests: Sequence[CheckedRequest]) -> JoinedBatch:
        """Several requests of equal `shapes` as one batch."""
        return JoinedBatch.of(requests)

    def repeated(self, requests: Sequence[CheckedRequest]) -> list[CheckedRequest] | None:  # noqa: ARG002
        """The requests with the context repeated for each candidate; None where that changes nothing."""
        return None

    def computed(self, requests: Sequence[CheckedRequest]) -> tuple[str, ...]:
        """The outputs that the network has to compute for a batch."""
        return self.outputs.of_requests([request.outputs for request in requests]).computed

    def split(self, computed: Answer, requests: Sequence[CheckedRequest]) -> list[Answer]:
        """The outputs that each request of a batch asked for, taken from the network's outputs for the batch."""
        wanted = [request.outputs for request in requests]
        return self.outputs.split(computed, wanted, [request.num_samples for request in requests])

    def _check_sample(self, name: str, num_elements: int) -> None:
        """ConfigurationError where one sample is larger than any request may be: warming up would take its memory."""
        limit = max(self.max_elements, DEFAULT_MAX_KEYS)
        if num_elements > limit:
            raise ConfigurationError(
                f"one sample of input {name!r} has {num_elements} elements by {SESSION_FILE}, above the limit of"
                f" {limit} (max_keys_per_request)"
            )

    def _check_size(self, name: str, array: NDArray[Any]) -> None:
        if array.size > self.max_elements:
            raise InvalidRequestError(
                f"input {name!r} has {array.size} elements, above the limit of {self.max_elements} "
                "(max_keys_per_request)"
            )
