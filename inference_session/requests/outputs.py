"""Selects the outputs that each request asked for from those of the dense network."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, InvalidRequestError
from inference_session.model_spec import PREDICTIONS, ModelSpec

Answer = dict[str, NDArray[Any]]
_MAX_KNOWN = 256
_FLOAT32 = np.dtype(np.float32)


class RequestedOutputs(NamedTuple):
    """The outputs that requests ask for."""

    names: Sequence[str]
    computed: tuple[str, ...]
    """What the network has to compute for it."""
    adds_predictions: bool
    """Whether the predictions are among `names`, and made of the network's outputs."""
    is_all: bool
    """Whether `names` are those, the predictions last."""


class Outputs:
    """The outputs a client may ask for: the model's own, and the predictions if any of them are labels."""

    def __init__(self, spec: ModelSpec) -> None:
        self._specs = {tensor.name: tensor for tensor in spec.outputs}
        self._label_outputs = spec.label_outputs
        self._num_labels = len(spec.labels)
        # A model's own output of that name must not be replaced.
        self._has_predictions = bool(spec.label_outputs) and PREDICTIONS not in self._specs
        self.names = (*self._specs, PREDICTIONS) if self._has_predictions else tuple(self._specs)
        self._known: dict[tuple[str, ...] | None, RequestedOutputs] = {}

    def resolve(self, wanted: Sequence[str] | None) -> Sequence[str]:
        """The requested outputs, all of them for None; InvalidRequestError for an unknown name."""
        for name in wanted or ():
            if name not in self.names:
                known = ", ".join(repr(name) for name in self.names)
                raise InvalidRequestError(f"the model has no output {name!r}; its outputs: {known}")
        return self.names if wanted is None else wanted

    def wanted(self, outputs: Collection[str] | None) -> RequestedOutputs:
        """The selection of requests with these outputs (None: all), cached. Errors are those of `resolve`."""
        key = None if outputs is None else tuple(outputs)
        known = self._known.get(key)
        if known is None:
            names = self.resolve(key)
            adds = self._has_predictions and PREDICTIONS in names
            computed = tuple(self.of_network([names]))
            made = (*computed, PREDICTIONS) if adds else computed
            known = RequestedOutputs(names, computed, adds, made == tuple(names))
            if len(self._known) < _MAX_KNOWN:
                self._known[key] = known
        return known

    def of_network(self, wanted: Sequence[Sequence[str]]) -> list[str]:
        """The outputs that the dense network has to compute for several requests."""
        names = dict.fromkeys(name for outputs in wanted for name in outputs)
        if self._has_predictions and PREDICTIONS in names:
            del names[PREDICTIONS]
            names.update(dict.fromkeys(self._label_outputs))
        return list(names)

    def split(self, computed: Answer, wanted: Sequence[Sequence[str]], num_samples: Sequence[int]) -> list[Answer]:
        """Each request's outputs as views of those of their batch."""
        if self._has_predictions and any(PREDICTIONS in outputs for outputs in wanted):
            computed = {**computed, PREDICTIONS: self.predictions(computed)}
        if len(wanted) == 1:
            return [{name: computed[name] for name in wanted[0]}]
        _check_samples(computed, sum(num_samples))
        answers = []
        begin = 0
        for outputs, count in zip(wanted, num_samples, strict=True):
            answers.append({name: computed[name][begin : begin + count] for name in outputs})
            begin += count
        return answers

    def split_alike(
        self, arrays: Sequence[NDArray[Any]], wanted: RequestedOutputs, num_samples: Sequence[int]
    ) -> list[Answer]:
        """As `split`, for requests that all want the same, from the arrays of `wanted.computed`."""
        computed = dict(zip(wanted.computed, arrays, strict=True))
        if wanted.adds_predictions:
            computed[PREDICTIONS] = self.predictions(computed)
        if not wanted.is_all:
            computed = {name: computed[name] for name in wanted.names}
        if len(num_samples) == 1:
            return [computed]
        _check_samples(computed, sum(num_samples))
        answers, begin = [], 0
        for count in num_samples:
            end = begin + count
            answers.append({name: array[begin:end] for name, array in computed.items()})
            begin = end
        return answers

    def predictions(self, computed: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """All tasks side by side: float32 [samples, number of labels]."""
        columns = [computed[name] for name in self._label_outputs]
        if not len(columns[0]):  # its other sizes may be open
            return np.empty((0, self._num_labels), np.float32)
        if len(columns) == 1 and columns[0].ndim == 2 and columns[0].dtype == _FLOAT32:
            return columns[0]  # most models: each call of NumPy costs a request about a microsecond
        parts = [c.reshape(len(c), math.prod(c.shape[1:])).astype(np.float32, copy=False) for c in columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def of_no_samples(self, wanted: Sequence[str]) -> Answer:
        """The answer to a request without samples, which networks often cannot compute."""
        return {name: self._empty(name) for name in wanted}

    def _empty(self, name: str) -> NDArray[Any]:
        if name not in self._specs:
            return np.empty((0, self._num_labels), np.float32)
        spec = self._specs[name]
        return np.empty((0, *(max(size, 0) for size in spec.shape[1:])), np.dtype(spec.dtype))


def _check_samples(computed: Answer, total: int) -> None:
    """Raise HotrowError unless every output has one row per sample."""
    for name, array in computed.items():
        if array.shape[:1] != (total,):
            raise HotrowError(f"output {name!r} has shape {list(array.shape)} for {total} samples")
