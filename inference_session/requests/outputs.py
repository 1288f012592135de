"""Selects the outputs that each request asked for from those of the dense network."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, InvalidRequestError
from inference_session.model_spec import PREDICTIONS, ModelSpec

Answer = dict[str, NDArray[Any]]
_MAX_KNOWN = 256
_FLOAT32 = np.dtype(np.float32)
_COPY = np.ndarray.copy
"""Mapped over arrays, it takes half as many instructions as a comprehension."""


class RequestedOutputs(NamedTuple):
    """The outputs that requests ask for."""

    names: Sequence[str]
    computed: tuple[str, ...]
    """The outputs of the network that these are made of."""
    labels: tuple[int, ...]
    """The positions in `computed` of the labels, if the requests ask for predictions."""
    positions: tuple[int, ...]
    """The position of each of `names` in `computed`; predictions, if asked for, come after the last one."""


class JoinedAnswer(NamedTuple):
    """The answers to requests that want the same outputs, not divided yet."""

    names: Sequence[str]
    arrays: list[NDArray[Any]]
    """An output for each of `names`. The rows of the first request come first, then those of the second, and so on."""
    counts: NDArray[np.int64]
    """The samples of each request: int64 [requests], contiguous."""

    def copied(self) -> JoinedAnswer:
        """The same in memory of its own."""
        return JoinedAnswer(self.names, list(map(_COPY, self.arrays)), self.counts.copy())

    def copied_answer(self) -> Answer:
        """The answer to the only request, in memory of its own."""
        if len(self.arrays) == 1:  # in half of the time of what is below
            return {self.names[0]: self.arrays[0].copy()}
        return dict(zip(self.names, map(_COPY, self.arrays)))  # noqa: B905  the keyword takes a third of the time

    def copied_answers(self) -> list[Answer]:
        """The answer of each request, in memory of their own."""
        return JoinedAnswer(self.names, list(map(_COPY, self.arrays)), self.counts).split()

    def split(self) -> list[Answer]:
        """The answer of each request, as views."""
        if len(self.counts) == 1:  # whatever its outputs have in place of samples
            return [dict(zip(self.names, self.arrays, strict=True))]
        answers, begin, named = [], 0, list(zip(self.names, self.arrays, strict=True))
        for count in self.counts.tolist():
            rows = slice(begin, begin + count)
            answers.append({name: array[rows] for name, array in named})
            begin += count
        return answers


class Outputs:
    """The outputs a client may ask for: the model's own, and the predictions if any of them are labels."""

    def __init__(self, spec: ModelSpec) -> None:
        self._specs = {tensor.name: tensor for tensor in spec.outputs}
        self._batched = spec.batched
        self._label_outputs = spec.label_outputs
        self._num_labels = len(spec.labels)
        self._has_fixed_labels = all(-1 not in self._specs[name].shape[1:] for name in spec.label_outputs)
        # A model's own output of that name must not be replaced.
        self._has_predictions = bool(spec.label_outputs) and PREDICTIONS not in self._specs
        self.names = (*self._specs, PREDICTIONS) if self._has_predictions else tuple(self._specs)
        self._known: dict[tuple[str, ...] | None, RequestedOutputs] = {}
        self._sizes = {tensor.name: tensor.shape[1:] for tensor in spec.outputs}
        """The sizes of a sample's part of each output; -1 where no answer has shown an open one."""

    def resolve(self, wanted: Sequence[str] | None) -> Sequence[str]:
        """The requested outputs, all of them for None; InvalidRequestError for an unknown name."""
        names = self.names if wanted is None else tuple(wanted)  # an iterator can be read once
        for name in names:
            if name not in self.names:
                known = ", ".join(repr(name) for name in self.names)
                raise InvalidRequestError(f"the model has no output {name!r}; its outputs: {known}")
        return names

    def wanted(self, outputs: Collection[str] | None) -> RequestedOutputs:
        """The selection of requests with these outputs (None: all), cached. Errors are those of `resolve`."""
        try:
            key = None if outputs is None else tuple(outputs)
            known = self._known.get(key)
        except TypeError as error:
            raise InvalidRequestError(f"outputs are {outputs!r}, expected a list of names") from error
        if known is None:
            names = self.resolve(key)
            adds = self._has_predictions and PREDICTIONS in names
            own = [name for name in names if not (adds and name == PREDICTIONS)]
            computed = tuple(dict.fromkeys([*own, *(self._label_outputs if adds else ())]))
            made = (*computed, PREDICTIONS) if adds else computed
            labels = tuple(map(computed.index, self._label_outputs)) if adds else ()
            known = RequestedOutputs(names, computed, labels, tuple(map(made.index, names)))
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = known
        return known

    def of_requests(self, requests: Sequence[Sequence[str]]) -> RequestedOutputs:
        """What several requests ask for, all together."""
        first, *others = requests
        if all(outputs == first for outputs in others):
            return self.wanted(first)
        return self.wanted(tuple(dict.fromkeys(name for outputs in requests for name in outputs)))

    def split(self, computed: Answer, requests: Sequence[Sequence[str]], num_samples: Sequence[int]) -> list[Answer]:
        """Each request's outputs as views of those of their batch."""
        wanted = self.of_requests(requests)
        arrays = [computed[name] for name in wanted.computed]
        joined = self.joined(arrays, wanted, np.array(num_samples, np.int64), sum(num_samples))
        if wanted.labels:
            place, label = wanted.names.index(PREDICTIONS), arrays[wanted.labels[0]]
            if np.may_share_memory(joined.arrays[place], label):  # callers may write to one and keep the other
                joined.arrays[place] = joined.arrays[place].copy()
        return [
            answer if outputs == wanted.names else {name: answer[name] for name in outputs}
            for outputs, answer in zip(requests, joined.split(), strict=True)
        ]

    def joined(
        self, arrays: Sequence[NDArray[Any]], wanted: RequestedOutputs, counts: NDArray[np.int64], num_samples: int
    ) -> JoinedAnswer:
        """The answer to requests with these numbers of samples, [requests], from the arrays of `wanted.computed`.

        `num_samples`: the sum of `counts`.
        """
        if wanted.labels:
            arrays = [*arrays, self.predictions(list(map(arrays.__getitem__, wanted.labels)))]
        if len(counts) > 1:
            _check_samples((*wanted.computed, PREDICTIONS), arrays, num_samples)
        return JoinedAnswer(wanted.names, list(map(arrays.__getitem__, wanted.positions)), counts)

    def predictions(self, labels: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """All tasks side by side, from the label outputs: float32 [samples, number of labels]."""
        first = labels[0]
        if not all(label.ndim for label in labels):  # as of a Squeeze where there is one sample
            raise HotrowError(f"{PREDICTIONS} cannot be made of outputs without a dimension of samples")
        if not len(first):  # its other sizes may be open
            return np.empty((0, self._num_labels), np.float32)
        if len(labels) == 1 and first.ndim == 2 and first.dtype == _FLOAT32:
            return first  # most models: each call of NumPy costs a request about a microsecond
        parts = [c.reshape(len(c), math.prod(c.shape[1:])).astype(np.float32, copy=False) for c in labels]
        if len(parts) == 1:
            return parts[0]
        try:
            return np.concatenate(parts, axis=1)
        except ValueError as error:
            shapes = ", ".join(str(list(label.shape)) for label in labels)
            raise HotrowError(f"{PREDICTIONS} cannot be made of outputs of different lengths: {shapes}") from error

    def difference(self, answer: Answer) -> str | None:
        """What is different in an answer of all outputs from what session.json says of them; None: nothing is."""
        for name, tensor in self._specs.items():
            found = answer[name]
            shape = (-1, *tensor.shape[1:]) if self._batched else tensor.shape
            if found.dtype.name != tensor.dtype or not _is_of(found.shape, shape):
                return (
                    f"output {name!r} is {tensor.dtype} {list(tensor.shape)}, but the network computes "
                    f"{found.dtype.name} {list(found.shape)}"
                )
        # Where their number is open, the generated values of this answer may lead to fewer columns than a request's.
        is_fixed = self._has_predictions and self._has_fixed_labels
        if is_fixed and (num_columns := answer[PREDICTIONS].shape[1]) != self._num_labels:
            return f"field 'labels' has {self._num_labels} names, but the predictions have {num_columns} columns"
        return None

    def learn_sizes(self, answer: Answer) -> None:
        """Take sizes that session.json leaves open from an answer of all outputs, for answers without samples."""
        self._sizes = {name: answer[name].shape[1:] for name in self._sizes}

    def of_no_samples(self, wanted: Sequence[str]) -> Answer:
        """The answer to a request without samples, which networks often cannot compute."""
        return {name: self._empty(name) for name in wanted}

    def _empty(self, name: str) -> NDArray[Any]:
        if name not in self._specs:
            return np.empty((0, self._num_labels), np.float32)
        return np.empty((0, *(max(size, 0) for size in self._sizes[name])), np.dtype(self._specs[name].dtype))


def _is_of(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an array of these sizes has a shape, in which -1 is any size."""
    return len(sizes) == len(shape) and all(wanted in (-1, size) for size, wanted in zip(sizes, shape, strict=True))


def _check_samples(names: Sequence[str], arrays: Sequence[NDArray[Any]], total: int) -> None:
    """Raise HotrowError unless every output has one row per sample."""
    for i, array in enumerate(arrays):
        if array.shape[:1] != (total,):
            raise HotrowError(f"output {names[i]!r} has shape {list(array.shape)} for {total} samples")
