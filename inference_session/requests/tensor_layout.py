"""Requests that carry the model's own inputs: checked one by one, and joined where their shapes allow."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.model_spec import ModelSpec, NamedArrays, TensorSpec
from inference_session.requests.batch import CheckedRequest, JoinedBatch, Part, RaggedBags, Request, RequestLayout
from inference_session.requests.outputs import Outputs


@dataclass(frozen=True)
class _ExpectedTensor:
    """What the check of one input expects. It is taken from the TensorSpec once."""

    name: str
    dtype: np.dtype[Any]
    rank: int
    fixed: tuple[tuple[int, int], ...]
    """(axis, size) of the dimensions that may have one size only."""
    ragged: bool
    """The last dimension may differ between the requests of one batch."""
    context: bool
    """The first dimension counts contexts, not samples."""


class TensorLayout(RequestLayout):
    """A request carries the model's own inputs, each [samples, …] where the model is batched."""

    keys_follow_inputs = True

    def __init__(self, spec: ModelSpec, outputs: Outputs, *, network_inputs: frozenset[str], max_elements: int) -> None:
        super().__init__(spec, outputs, network_inputs=network_inputs, max_elements=max_elements)
        self._equal_sizes = spec.equal_sizes
        self.ragged = _ragged_inputs(spec, network_inputs)
        """Inputs whose last dimension may differ between the requests of one batch."""
        self._inputs = tuple(_expected(tensor, tensor.name in self.ragged) for tensor in spec.inputs)
        self.values = {tensor.name: tensor.dtype for tensor in spec.inputs}
        for expected in self._inputs:
            self._check_sample(expected.name, math.prod(size for _, size in expected.fixed))

    def check(self, request: Request) -> CheckedRequest:
        inputs, shapes, (num_samples, _) = self._check_inputs(request.inputs)
        return CheckedRequest(inputs, self.outputs.resolve(request.outputs), max(num_samples, 0), shapes)

    def _check_inputs(self, inputs: NamedArrays) -> tuple[NamedArrays, tuple[Hashable, ...], tuple[int, int]]:
        """The inputs, the shapes that joined requests share, and the numbers of samples and contexts (-1: none)."""
        if len(inputs) != len(self._inputs):
            self._explain_names(inputs)
        counts = [-1, -1]
        shapes: list[Hashable] = []
        checked = {}
        for expected in self._inputs:
            array = inputs.get(expected.name)
            if array is None:
                self._explain_names(inputs)
                continue
            array = _plain(array, expected)
            if array.dtype != expected.dtype or array.ndim != expected.rank or array.size > self.max_elements:
                self._explain_array(expected, array)
            shape = array.shape
            for axis, size in expected.fixed:
                if shape[axis] != size:
                    self._explain_shape(expected, array)
            if self.batched:
                if shape[0] != counts[expected.context]:
                    if counts[expected.context] >= 0:
                        self._explain_samples(expected, array, counts[expected.context])
                    counts[expected.context] = shape[0]
                shapes.append(shape[1:-1] if expected.ragged else shape[1:])
            checked[expected.name] = array if array.dtype != object else _decoded(expected.name, array)
        for group in self._equal_sizes:
            self._check_sizes(group, checked)
        return checked, tuple(shapes), (counts[0], counts[1])

    def _check_sizes(self, group: Sequence[tuple[str, int]], inputs: NamedArrays) -> None:
        (first, first_axis), *others = group
        for name, axis in others:
            shape, expected = inputs[name].shape, inputs[first].shape
            if shape[axis] != expected[first_axis]:
                raise InvalidRequestError(
                    f"input {name!r} has shape {list(shape)}, but {first!r} has {list(expected)}: dimension {axis} of "
                    f"{name!r} and dimension {first_axis} of {first!r} must be the same"
                )

    def generated(self, num_samples: int) -> Request:
        return Request({expected.name: self._zeros(expected, num_samples) for expected in self._inputs})

    def _zeros(self, expected: _ExpectedTensor, num_samples: int) -> NDArray[Any]:
        fixed = dict(expected.fixed)
        shape = [fixed.get(axis, 1) for axis in range(expected.rank)]
        if self.batched:
            shape[0] = num_samples
        if expected.dtype == object:
            return np.full(shape, "", object)
        # Zeros take no memory until they are read, and the request may be refused for its size.
        return np.zeros(shape, expected.dtype)

    def join(self, requests: Sequence[CheckedRequest]) -> JoinedBatch:
        batch = JoinedBatch.of(requests)
        if len(requests) > 1:
            self._even_out(batch)
        return batch

    def _even_out(self, batch: JoinedBatch) -> None:
        """Make bags of inputs whose lengths differ."""
        for expected in self._inputs:
            if expected.ragged and expected.name in batch:
                batch.replace(expected.name, _even_out(batch.parts(expected.name)))

    def _explain_names(self, inputs: NamedArrays) -> None:
        expected = [e.name for e in self._inputs]
        missing = [name for name in expected if inputs.get(name) is None]
        if missing:
            raise InvalidRequestError(f"input {missing[0]!r} is missing; the model's inputs: {_listed(expected)}")
        unknown = [name for name in inputs if name not in expected]
        raise InvalidRequestError(f"the model has no input {unknown[0]!r}; its inputs: {_listed(expected)}")

    def _explain_array(self, expected: _ExpectedTensor, array: NDArray[Any]) -> None:
        self._check_size(expected.name, array)
        where = f"input {expected.name!r}"
        if array.dtype != expected.dtype:
            raise InvalidRequestError(f"{where} has type {array.dtype}, expected {expected.dtype}")
        raise InvalidRequestError(f"{where} has shape {list(array.shape)}, expected {expected.rank} dimensions")

    def _explain_shape(self, expected: _ExpectedTensor, array: NDArray[Any]) -> None:
        fixed = dict(expected.fixed)
        wanted = [fixed.get(axis, -1) for axis in range(expected.rank)]
        raise InvalidRequestError(
            f"input {expected.name!r} has shape {list(array.shape)}, expected {wanted} (-1: any size)"
        )

    def _explain_samples(self, expected: _ExpectedTensor, array: NDArray[Any], num_samples: int) -> None:
        first = next(other.name for other in self._inputs if other.context == expected.context)
        unit = "contexts" if expected.context else "samples"
        raise InvalidRequestError(
            f"input {expected.name!r} has {array.shape[0]} {unit}, but {first!r} has {num_samples}"
        )


def _expected(tensor: TensorSpec, ragged: bool) -> _ExpectedTensor:
    fixed = tuple((axis, size) for axis, size in enumerate(tensor.shape) if size >= 0)
    return _ExpectedTensor(tensor.name, np.dtype(tensor.dtype), len(tensor.shape), fixed, ragged, tensor.context)


def _ragged_inputs(spec: ModelSpec, network_inputs: frozenset[str]) -> set[str]:
    """Inputs whose last dimension is always a bag of keys, so that requests of different lengths can be joined."""
    lookups = (*spec.lookups, *(spec.ranking.lookups if spec.ranking else ()))
    pooled = {lookup.keys for lookup in lookups if lookup.pooling != "none" and lookup.weights is None}
    others = {lookup.keys for lookup in lookups if lookup.pooling == "none" or lookup.weights is not None}
    bags = pooled - others - network_inputs
    return {t.name for t in spec.inputs if t.name in bags and len(t.shape) > 1 and t.shape[-1] == -1}


def _even_out(arrays: Sequence[Any]) -> list[Part]:
    """Keys [samples, …, L] of requests with different L, as concatenated bags; keys of equal L unchanged."""
    if all(array.shape[1:] == arrays[0].shape[1:] for array in arrays):
        return list(arrays)
    lengths = np.concatenate([np.full(math.prod(a.shape[:-1]), a.shape[-1], np.int64) for a in arrays])
    ends = np.cumsum(lengths)
    shape = (sum(len(a) for a in arrays), *arrays[0].shape[1:-1])
    values = np.concatenate(arrays, axis=None)
    return [RaggedBags(values, ends - lengths, ends, shape, values.size)]


def _plain(array: NDArray[Any], expected: _ExpectedTensor) -> NDArray[Any]:
    if type(array) is not np.ndarray and isinstance(array, np.ndarray):
        if np.ma.is_masked(array):
            raise InvalidRequestError(f"input {expected.name!r} has masked elements: fill them first")
        array = np.asarray(array)  # a matrix would have two dimensions whatever its shape is to be
    if not expected.rank and array.shape == (1,):
        return array.reshape(())  # a scalar, from a server that cannot send scalars
    return array


def _decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Strings as ONNX Runtime wants them; Triton hands over bytes."""
    try:
        texts = [_text(item) for item in array.reshape(-1)]
    except (UnicodeError, TypeError) as error:
        raise InvalidRequestError(f"input {name!r} holds a value that is not a UTF-8 string: {error}") from error
    return np.array(texts, dtype=object).reshape(array.shape)


def _text(item: object) -> str:
    if isinstance(item, bytes):
        return item.decode()
    if not isinstance(item, str):
        raise TypeError(f"found {item!r}")
    item.encode()  # Python allows strings that UTF-8 cannot encode, and ONNX Runtime needs UTF-8
    return str(item)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
