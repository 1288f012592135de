"""Random requests that a model answers: to compare versions with, or to load a server."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import HotrowError, UnsupportedModelError
from inference_session.model_spec import KEY_FILE, TABLES_FOLDER, NamedArrays, TableSpec

_NUM_SAMPLES = 64
_NUM_REQUESTS = 4
_OPEN_SIZE = 3
"""Size of dimensions that the model leaves open, such as the length of a list."""
_MAX_BOUND = 2**31
"""Used for ids that the network hashes or clips, which have no bound."""
_LIMITS = (_MAX_BOUND, 1000, 100, 10, 2, 1)
"""Of bounds: the model may not answer the largest values of all inputs at once."""


def random_requests(session: InferenceSession) -> list[NamedArrays]:
    """Requests that the session answers, with few unknown keys; UnsupportedModelError if none is found."""
    source = RandomRequests(session)
    answered: dict[int, list[NamedArrays]] = {}
    for limit in _LIMITS:
        random = np.random.default_rng(0)
        requests = [source.draw(random, limit) for _ in range(_NUM_REQUESTS)]
        num_unknown = source.num_unknown(*requests)
        if num_unknown == 0:
            return requests
        if num_unknown is not None:
            answered.setdefault(num_unknown, requests)
    if not answered:
        raise UnsupportedModelError("the model answered none of the random requests; give recorded requests")
    return answered[min(answered)]


class RandomRequests:
    """Draws requests: keys of the tables, and other integers that the model answers without an unknown key."""

    def __init__(
        self,
        session: InferenceSession,
        *,
        num_samples: int = _NUM_SAMPLES,
        num_contexts: int | None = None,
        length: int = _OPEN_SIZE,
    ) -> None:
        """Ask the session how high integers may go that are not looked up directly.

        Args:
            num_samples: of each request; fewer where the model takes fewer.
            num_contexts: rows of inputs of the context, if not one for each sample.
            length: of dimensions that the model leaves open.
        """
        self._session, self._spec = session, session.spec
        samples = min(num_samples, self._spec.layout_options.get("max_samples") or num_samples)
        self._zeros = dict(session.layout.generated(samples).inputs)
        self._bounds: dict[str, int] = {}
        if self._spec.has_own_inputs:
            rows = {True: samples if num_contexts is None else num_contexts, False: samples}
            for tensor in self._spec.inputs:
                shape = tuple(length if size == -1 else size for size in tensor.shape)
                shape = (rows[tensor.context], *shape[1:]) if self._spec.batched else shape
                zero = "" if tensor.dtype == "object" else 0
                self._zeros[tensor.name] = np.full(shape, zero, tensor.dtype)
            self._find_bounds()

    def draw(self, random: np.random.Generator, limit: int = _MAX_BOUND) -> NamedArrays:
        """One request; no integer that is not looked up directly reaches the limit."""
        if not self._spec.has_own_inputs:
            return {name: self._packed(name, zeros, random) for name, zeros in self._zeros.items()}
        filled = {name: self._values(name, zeros, random, limit) for name, zeros in self._zeros.items()}
        self._fill_keys(filled, random)
        return filled

    def num_unknown(self, *requests: NamedArrays) -> int | None:
        """Number of keys that are in no table; None if the model does not answer."""
        before = self._num_default_vectors()
        try:
            for request in requests:
                self._session.run(request)
        except HotrowError:
            return None
        return self._num_default_vectors() - before

    def _num_default_vectors(self) -> int:
        return sum(table.default_vectors for table in self._session.snapshot().session.tables.values())

    def _find_bounds(self) -> None:
        request = {name: zeros.copy() for name, zeros in self._zeros.items()}
        self._fill_keys(request, np.random.default_rng(0))
        num_unknown = self.num_unknown(request)
        looked_up = {lookup.keys for lookup in self._spec.lookups}
        for name, zeros in self._zeros.items():
            if zeros.dtype.kind in "iu" and name not in looked_up:
                self._bounds[name] = self._bound(name, request, num_unknown)

    def _bound(self, name: str, request: NamedArrays, num_unknown: int | None) -> int:
        """What the integers of an input have to be below: then the request has no more unknown keys than with 0."""

        def is_known(bound: int) -> bool:
            found = self.num_unknown({**request, name: np.full_like(request[name], bound - 1)})
            return found is not None and found == num_unknown

        known, unknown = 1, min(_MAX_BOUND, int(np.iinfo(request[name].dtype).max))
        if is_known(unknown):
            return unknown
        while unknown - known > 1:
            middle = min(2 * known, (known + unknown) // 2)  # most bounds are small
            known, unknown = (middle, unknown) if is_known(middle) else (known, middle)
        return known

    def _values(self, name: str, zeros: NDArray[Any], random: np.random.Generator, limit: int) -> NDArray[Any]:
        if zeros.dtype == object:
            return random.integers(0, 10, zeros.shape).astype(str).astype(object)
        if zeros.dtype.kind == "f":
            return random.random(zeros.shape).astype(zeros.dtype)
        bound = 2 if zeros.dtype.kind == "b" else min(self._bounds.get(name, 1), limit)
        return random.integers(0, bound, zeros.shape).astype(zeros.dtype)

    def _fill_keys(self, arrays: NamedArrays, random: np.random.Generator) -> None:
        """Put keys into inputs that are looked up directly; for several tables, keys of the smallest."""
        tables = {table.folder: table for table in self._spec.tables}
        for lookup in sorted(self._spec.lookups, key=lambda lookup: tables[lookup.table].num_rows, reverse=True):
            if lookup.keys in arrays:
                array = arrays[lookup.keys]
                part = array if lookup.columns is None else array[:, slice(*lookup.columns)]
                part[...] = self._keys(tables[lookup.table], part.size, random).reshape(part.shape)

    def _packed(self, name: str, zeros: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
        """An input of HugeCTR or HPS: keys are ordered table by table."""
        if zeros.dtype.kind == "f":
            return random.random(zeros.shape).astype(zeros.dtype)
        tables = {table.folder: table for table in self._spec.tables}
        reads = [lookup for lookup in self._spec.lookups if lookup.keys.startswith(f"{name}/")]
        if not reads:
            return zeros  # offsets, counts
        slots = self._spec.layout_options.get("slots", [1] * len(reads))
        counts = [zeros.size // sum(slots) * width for width in slots]
        keys = [self._keys(tables[read.table], n, random) for read, n in zip(reads, counts, strict=True)]
        return np.concatenate(keys).astype(zeros.dtype)

    def _keys(self, table: TableSpec, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Keys of rows of a table; zeros where it has none."""
        if not table.num_rows:
            return np.zeros(count, np.int64)
        rows = random.integers(0, table.num_rows, count)
        if table.keys == "row_number":
            return rows
        return np.array(np.memmap(self._session.directory / TABLES_FOLDER / table.folder / KEY_FILE, "<i8", "r")[rows])
