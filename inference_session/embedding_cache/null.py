"""NullEmbeddingCache: the contract with nothing in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.embedding_cache.base import ROW_COUNTS, EmbeddingCache, LookupResult
from inference_session.errors import SessionClosedError
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES
from inference_session.kernels.records import TABLE

_EMPTY_BUCKET = np.zeros(BUCKET_BYTES, np.uint8)


class NullEmbeddingCache(EmbeddingCache):
    """Takes rows and forgets them; every look-up misses. What it refuses, every cache refuses."""

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._checked_rows(table, keys, vectors)

    update = insert

    @contextlib.contextmanager
    def reading(self) -> Iterator[NDArray[np.void]]:
        """TABLE records of empty tables, as CpuEmbeddingCache gives those of its rows."""
        if self._closed:
            raise SessionClosedError("the embedding cache has been closed")
        yield empty_tables(np.array(list(self.dims.values()), np.int64))

    def lookup(
        self,
        keys: Mapping[str, ArrayLike],
        out: Mapping[str, NDArray[np.float32]] | None = None,
        wait: bool = False,  # noqa: ARG002 - there is nothing to wait for
    ) -> LookupResult:
        """See EmbeddingCache."""
        counts = {table: len(self._checked_keys(table, asked)) for table, asked in keys.items()}
        vectors = {table: self._output(table, count, out) for table, count in counts.items()}
        num_keys = list(counts.values())
        self.count_lookups([self._positions[table] for table in counts], num_keys, num_keys)
        return LookupResult(vectors, {table: np.arange(count) for table, count in counts.items()})

    def erase(self, table: str, keys: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._checked_keys(table, keys)

    def dump(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        self._check(table)
        return np.empty(0, np.int64)

    def close(self) -> None:
        """See EmbeddingCache."""
        self._closed = True

    def _row_counts(self, table: str) -> dict[str, int]:
        self._check(table)
        return dict.fromkeys(ROW_COUNTS, 0)


def empty_tables(dims: NDArray[np.int64]) -> NDArray[np.void]:
    """TABLE records of tables of these embedding_dims that have no rows and no default vectors."""
    records = np.zeros(len(dims), TABLE)
    records["index_address"], records["num_buckets"] = _EMPTY_BUCKET.ctypes.data, 1
    records["embedding_dim"], records["row_bytes"] = dims, 4 * dims
    records["next_table"] = -1
    return records
