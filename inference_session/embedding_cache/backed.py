"""BackedCache: a cache in host memory whose misses are served from rows beside it, as the GPU cache serves its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.embedding_cache.base import EmbeddingCache, LookupResult, check_backing
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile
from inference_session.tables.table_index import index_in_memory


class BackedCache(EmbeddingCache):
    """What the cache inside has comes first; keys that neither has are missing."""

    def __init__(self, cache: EmbeddingCache, backing: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> None:
        """Index the backing rows, by table keys int64 [n] and vectors float32 [n, embedding_dim]; of equal keys the
        last row counts. `cache` becomes this object's to close.
        """
        super().__init__(cache.dims)
        self.cache_bytes = cache.cache_bytes
        self._cache = cache
        self._backing = {table: self._open(table, *rows) for table, rows in backing.items()}

    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._cache.insert(table, keys, vectors)

    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """See EmbeddingCache."""
        self._cache.update(table, keys, vectors)

    def lookup(
        self, keys: Mapping[str, ArrayLike], out: Mapping[str, NDArray[np.float32]] | None = None, wait: bool = False
    ) -> LookupResult:
        """See EmbeddingCache."""
        vectors, uncached = self._cache.lookup(keys, out, wait)
        missing = dict(uncached)
        for table in self._backing.keys() & keys.keys():
            positions = uncached[table]
            found = self._complete(table, np.asarray(keys[table])[positions], positions, vectors[table])
            missing[table] = positions[~found]
        return LookupResult(vectors, missing)

    def erase(self, table: str, keys: ArrayLike) -> None:
        """See EmbeddingCache; backing rows stay."""
        self._cache.erase(table, keys)

    def dump(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        return self._cache.dump(table)

    def hottest(self, table: str) -> NDArray[np.int64]:
        """See EmbeddingCache."""
        return self._cache.hottest(table)

    def stats(self) -> dict[str, Any]:
        """See EmbeddingCache. `misses` counts keys that backing rows answered as well."""
        return self._cache.stats()

    def forget_lookups(self) -> None:
        """See EmbeddingCache."""
        self._cache.forget_lookups()

    def close(self) -> None:
        """See EmbeddingCache."""
        self._cache.close()

    def __repr__(self) -> str:
        return f"<BackedCache of {self._cache!r}>"

    def _open(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> TableFile:
        dim, key_array, rows = self._check(table), np.asarray(keys), np.asarray(vectors)
        if rows.size == 0:
            rows = np.zeros((len(rows), dim), np.float32)
        check_backing(table, key_array, rows, dim)
        key_array = np.ascontiguousarray(key_array, np.int64)
        spec = TableSpec(table, table, len(rows), dim)
        return TableFile(spec, np.ascontiguousarray(rows), key_array, index_in_memory(key_array))

    def _complete(
        self, table: str, keys: NDArray[Any], positions: NDArray[np.int64], vectors: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Write the backing rows of some keys to their positions in `vectors`; returns which there are."""
        rows = np.empty((len(keys), self.dims[table]), np.float32)
        found = self._backing[table].fetch(keys.astype(np.int64), rows)
        vectors[positions[found]] = rows[found]
        return found

    def _row_counts(self, table: str) -> dict[str, int]:
        return self._cache._row_counts(table)
