"""Random inputs that any model accepts: requests to the model find the highest valid ids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import HotrowError
from inference_session.model_spec import TensorSpec

Inputs = dict[str, NDArray[np.generic]]

MAX_BOUND = 2**31
"""Used for ids that the network hashes or clips, which have no bound."""


class RandomInputs:
    """Draws requests of this many samples, and contexts if the model has any; open dimensions get that length."""

    def __init__(
        self, session: InferenceSession, *, num_samples: int, length: int, num_contexts: int | None = None
    ) -> None:
        if not session.spec.has_own_inputs:
            raise SystemExit(f"{session.directory}: requests of layout {session.spec.layout!r} cannot be made up here")
        self._session = session
        batched = session.spec.batched
        num_rows = {True: num_samples if num_contexts is None else num_contexts, False: num_samples}
        self._shapes = {
            tensor.name: _shape(tensor, num_rows[tensor.context], length, batched) for tensor in session.spec.inputs
        }
        self.bounds = {tensor.name: self._bound(tensor) for tensor in session.spec.inputs if _is_integer(tensor)}

    def draw(self, rng: np.random.Generator) -> Inputs:
        """One request; SystemExit if the model does not accept it."""
        inputs = {tensor.name: self._random(rng, tensor) for tensor in self._session.spec.inputs}
        try:
            self._session.run(inputs)
        except HotrowError as error:
            raise SystemExit(f"{self._session.directory} does not accept random inputs: {error}") from error
        return inputs

    def _random(self, rng: np.random.Generator, tensor: TensorSpec) -> NDArray[np.generic]:
        shape = self._shapes[tensor.name]
        if tensor.name in self.bounds:
            return rng.integers(0, self.bounds[tensor.name], shape).astype(tensor.dtype)
        if tensor.dtype == "object":
            return rng.integers(0, 1000, shape).astype(str).astype(object)
        return rng.random(shape).astype(tensor.dtype) if tensor.dtype != "bool" else rng.integers(0, 2, shape) > 0

    def _bound(self, tensor: TensorSpec) -> int:
        """The ids 0 … bound - 1 are known: those of a table in the network, or in a table file."""
        known, unknown = 1, min(MAX_BOUND, int(np.iinfo(tensor.dtype).max))
        while unknown - known > 1:
            middle = (known + unknown) // 2
            known, unknown = (middle, unknown) if self._knows(tensor, middle - 1) else (known, middle)
        return known

    def _knows(self, tensor: TensorSpec, key: int) -> bool:
        inputs: Inputs = {other.name: _zeros(other, self._shapes[other.name]) for other in self._session.spec.inputs}
        inputs[tensor.name] = np.full(self._shapes[tensor.name], key, tensor.dtype)
        before = self._num_defaults()
        try:
            self._session.run(inputs)
        except HotrowError:
            return False
        return self._num_defaults() == before

    def _num_defaults(self) -> int:
        return sum(table["default_vectors"] for table in self._session.stats()["tables"].values())


def _shape(tensor: TensorSpec, num_samples: int, length: int, batched: bool) -> tuple[int, ...]:
    shape = tuple(length if size == -1 else size for size in tensor.shape)
    return (num_samples, *shape[1:]) if batched else shape


def _zeros(tensor: TensorSpec, shape: tuple[int, ...]) -> NDArray[np.generic]:
    return np.full(shape, "", object) if tensor.dtype == "object" else np.zeros(shape, tensor.dtype)


def _is_integer(tensor: TensorSpec) -> bool:
    return tensor.dtype != "object" and np.dtype(tensor.dtype).kind in "iu"
