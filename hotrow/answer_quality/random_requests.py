"""Requests with random keys of a version, to compare it with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.errors import HotrowError, UnsupportedModelError
from inference_session.model_spec import KEY_FILE, TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.requests.canary import Arrays

_NUM_SAMPLES = 64
_NUM_REQUESTS = 4
_OPEN_SIZE = 3
"""Size of dimensions that the model leaves open, such as the length of a list."""
_BOUNDS = (1000, 100, 10, 2, 1)
"""Bounds for integers that are not used directly as keys: the first bound is taken that the model answers without an
unknown key, else the first that it answers."""


def random_requests(session: InferenceSession) -> list[Arrays]:
    """Requests that the session answers; UnsupportedModelError if none is found."""
    answered: dict[int, list[Arrays]] = {}
    for bound in _BOUNDS:
        random = np.random.default_rng(0)
        requests = [_random_request(session, random, bound) for _ in range(_NUM_REQUESTS)]
        num_unknown = _num_unknown(session, requests)
        if num_unknown == 0:
            return requests
        if num_unknown is not None:
            answered.setdefault(num_unknown, requests)
    if not answered:
        raise UnsupportedModelError("the model answered none of the random requests; give recorded requests")
    return answered[min(answered)]


def _num_unknown(session: InferenceSession, requests: list[Arrays]) -> int | None:
    """Number of keys that are in no table; None if the model does not answer."""
    before = _default_vectors(session)
    try:
        for request in requests:
            session.run(request)
    except HotrowError:
        return None
    return _default_vectors(session) - before


def _default_vectors(session: InferenceSession) -> int:
    return sum(table.default_vectors for table in session.snapshot().session.tables.values())


def _random_request(session: InferenceSession, random: np.random.Generator, bound: int) -> Arrays:
    spec, tables = session.spec, session.directory / TABLES_FOLDER
    zeros = session.layout.made_up(min(_NUM_SAMPLES, spec.layout_options.get("max_samples") or _NUM_SAMPLES)).inputs
    if spec.has_own_inputs:
        zeros = {name: _opened(spec, name, array) for name, array in zeros.items()}
        filled = {name: _random_values(random, array, bound) for name, array in zeros.items()}
        _fill_keys(spec, tables, filled, random)
        return filled
    return {name: _packed(spec, tables, name, array, random) for name, array in zeros.items()}


def _opened(spec: ModelSpec, name: str, zeros: NDArray[Any]) -> NDArray[Any]:
    """The array with a distinct size for dimensions that the model leaves open."""
    shape = next((tensor.shape for tensor in spec.inputs if tensor.name == name), zeros.shape)
    sizes = [
        _OPEN_SIZE if size == -1 and (axis or not spec.batched) else zeros.shape[axis]
        for axis, size in enumerate(shape)
    ]
    return np.zeros(sizes, zeros.dtype)


def _random_values(random: np.random.Generator, zeros: NDArray[Any], bound: int) -> NDArray[Any]:
    if zeros.dtype == object:
        return random.integers(0, 10, zeros.shape).astype(str).astype(object)
    if zeros.dtype.kind == "f":
        return random.random(zeros.shape).astype(zeros.dtype)
    return random.integers(0, 2 if zeros.dtype.kind == "b" else bound, zeros.shape).astype(zeros.dtype)


def _fill_keys(spec: ModelSpec, tables: Path, arrays: dict[str, NDArray[Any]], random: np.random.Generator) -> None:
    """Put keys into inputs that are looked up directly; for several tables, keys of the smallest."""
    sizes = {table.folder: table for table in spec.tables}
    for lookup in sorted(spec.lookups, key=lambda lookup: sizes[lookup.table].num_rows, reverse=True):
        if lookup.keys in arrays:
            array = arrays[lookup.keys]
            part = array if lookup.columns is None else array[:, slice(*lookup.columns)]
            part[...] = _random_keys(tables, sizes[lookup.table], part.size, random).reshape(part.shape)


def _packed(spec: ModelSpec, tables: Path, name: str, zeros: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """An input of HugeCTR or HPS: keys are ordered table by table."""
    if zeros.dtype.kind == "f":
        return random.random(zeros.shape).astype(zeros.dtype)
    by_table = {table.folder: table for table in spec.tables}
    reads = [lookup for lookup in spec.lookups if lookup.keys.startswith(f"{name}/")]
    if not reads:
        return zeros  # offsets, counts
    slots = spec.layout_options.get("slots", [1] * len(reads))
    counts = [zeros.size // sum(slots) * width for width in slots]
    keys = [_random_keys(tables, by_table[read.table], n, random) for read, n in zip(reads, counts, strict=True)]
    return np.concatenate(keys).astype(zeros.dtype)


def _random_keys(tables: Path, table: TableSpec, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Keys of rows of a table; zeros where it has none."""
    if not table.num_rows:
        return np.zeros(count, np.int64)
    rows = random.integers(0, table.num_rows, count)
    if table.keys == "row_number":
        return rows
    return np.array(np.memmap(tables / table.folder / KEY_FILE, "<i8", "r")[rows])
