"""Look-ups of plain lists of keys in an embedding cache, as a request makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.embedding_cache.base import EmbeddingCache
from inference_session.kernels.records import Lookup, key_segments


class Found(NamedTuple):
    """The result of a look-up, by table."""

    vectors: Mapping[str, NDArray[np.float32]]
    """[n, embedding_dim]; rows of missing keys are not written to."""
    missing: Mapping[str, NDArray[np.int64]]
    """Positions of missing keys, ascending."""


def look_up(cache: EmbeddingCache, keys: Mapping[str, ArrayLike], fill: float = 0.0) -> Found:
    """The vectors of keys, int64 [n] by table, each table in one segment; outputs hold `fill` before the look-up."""
    asked = {table: np.asarray(array, np.int64) for table, array in keys.items()}
    numbers = {table: number for number, table in enumerate(cache.dims)}
    with cache.device.request():
        staged = {table: cache.device.stage(array) for table, array in asked.items()}
        outputs = {
            t: cache.device.output(np.empty((len(array), cache.dims[t]), np.float32)) for t, array in asked.items()
        }
        for output in outputs.values():
            output[...] = fill
        segments = key_segments([*staged.values()], [*outputs.values()], [numbers[table] for table in asked])
        num_keys = np.array([len(array) for array in asked.values()], np.int64)
        lookup = Lookup(segments, num_keys, cache.device.counts(len(segments)), cache.prepare(segments))
        num_missing = cache.look_up(lookup)
        vectors = {table: output.copy() for table, output in outputs.items()}
        missing = {table: np.empty(0, np.int64) for table in asked}
        for misses in cache.misses(lookup):
            rows = misses.rows
            positions = np.split(rows.positions, np.cumsum(rows.counts)[:-1])
            for number, found in zip(rows.segments["table"].tolist(), positions, strict=True):
                missing[list(cache.dims)[number]] = found
    assert num_missing == sum(map(len, missing.values()))
    return Found(vectors, missing)
