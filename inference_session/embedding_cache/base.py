"""The contract of an embedding cache: the hottest rows of all tables of a model, within one budget of bytes.

How a session uses one that stands over a parameter server:

    with cache.reading() as tables:                      # TABLE records, one per table
        num_missing = cpu.lookup(tables, segments, …)    # straight into the dense network's inputs
    vectors = server.fetch(the missing keys)             # and into the places left open
    cache.insert(table, keys, vectors)                   # now, or later from another thread

`lookup` does the first step for callers who hold keys by table. Nobody but the cache may keep a record after `reading`
has ended: that is when replaced rows are used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inference_session.errors import ConfigurationError, InvalidRequestError, SessionClosedError, TableNotFoundError
from inference_session.model_spec import VectorType

Fetch = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.bool_]]
"""fetch(keys, out) → found[n], as EmbeddingStore.fetch of one table."""
Cache = TypeVar("Cache", bound="EmbeddingCache")

ROW_COUNTS = ("inserts", "updates", "evictions", "erases", "rows", "capacity", "bytes")
_KEYS_PER_REFRESH = 1 << 14
_FLOAT16_END = 65520.0
"""The least that float16 rounds to infinity."""


class LookupResult(NamedTuple):
    """What a look-up found, by table; arrays are CuPy's where the cache is on a GPU."""

    vectors: Mapping[str, NDArray[np.float32]]
    """[n, embedding_dim]. Rows of missing keys are as they were in `out`, or zeros where none was given."""
    missing: Mapping[str, NDArray[np.int64]]
    """Positions of the keys that are not there, ascending. A GPU cache's are worked out, and waited for, when read."""


class EmbeddingCache(ABC):
    """Rows by table and int64 key, any value of which is allowed. All methods may be called from any thread.

    A name that is no table's is a TableNotFoundError, keys or vectors of a wrong type or shape an InvalidRequestError,
    and any use after `close` a SessionClosedError.
    """

    def __init__(self, dims: Mapping[str, int]) -> None:
        """`dims`: the embedding_dim of each table by name."""
        for table, dim in dims.items():
            if not isinstance(dim, int) or dim < 1:
                raise ConfigurationError(f"table {table!r}: embedding_dim must be a whole number from 1, found {dim!r}")
        self.dims = dict(dims)
        self.cache_bytes = 0
        self._closed = False
        self._positions = {table: i for i, table in enumerate(dims)}
        self._count_lock = Lock()
        self._num_keys = np.zeros(len(dims), np.int64)
        self._num_missing = np.zeros(len(dims), np.int64)

    @abstractmethod
    def insert(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """Cache rows, replacing those whose keys are cached, at the cost of others where space is short.

        keys int64 [n], vectors floats [n, embedding_dim]; of equal keys in one call the last wins.
        """

    @abstractmethod
    def update(self, table: str, keys: ArrayLike, vectors: ArrayLike) -> None:
        """As `insert`, for those keys only that are cached."""

    @abstractmethod
    def lookup(
        self, keys: Mapping[str, ArrayLike], out: Mapping[str, NDArray[np.float32]] | None = None, wait: bool = False
    ) -> LookupResult:
        """The vectors of keys, int64 [n] by table.

        `out`, by table, takes them instead of new arrays: float32 [n, embedding_dim], rows at any distance. `wait`
        matters on a GPU only: False returns before the device is done.
        """

    @abstractmethod
    def erase(self, table: str, keys: ArrayLike) -> None:
        """Drop the rows of these keys, as far as they are cached."""

    @abstractmethod
    def dump(self, table: str) -> NDArray[np.int64]:
        """The keys that are cached, in no particular order; `lookup` gives their vectors."""

    def hottest(self, table: str) -> NDArray[np.int64]:
        """The keys that are cached, those that are asked for most first, as far as the cache knows."""
        return self.dump(table)

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once the look-ups under way have ended. May be called more than once."""

    def stats(self) -> dict[str, Any]:
        """Exact counts since the cache was created, in all and under `tables` by table.

        hits, misses: keys looked up that were cached, that were not
        inserts, updates: rows added, rows replaced by new contents
        evictions, erases: rows dropped for space, rows dropped by request
        rows, capacity: rows cached, rows that may be
        bytes: memory allocated, whether in use or not; in all never more than cache_bytes
        """
        rows = {table: self._row_counts(table) for table in self.dims}
        with self._count_lock:
            num_keys, num_missing = self._num_keys.tolist(), self._num_missing.tolist()
        tables = {
            table: {"hits": asked - missing, "misses": missing, **counts}
            for (table, counts), asked, missing in zip(rows.items(), num_keys, num_missing, strict=True)
        }
        totals = {name: sum(counts[name] for counts in tables.values()) for name in ("hits", "misses", *ROW_COUNTS)}
        return {"cache_bytes": self.cache_bytes, **totals, "tables": tables}

    def count_lookups(self, tables: Sequence[int], num_keys: Sequence[int], num_missing: Sequence[int]) -> None:
        """Report what was looked up under `reading`; tables by their position in `dims`, each once at most."""
        with self._count_lock:
            for table, keys, missing in zip(tables, num_keys, num_missing, strict=True):
                self._num_keys[table] += keys
                self._num_missing[table] += missing

    def forget_lookups(self) -> None:
        """Count look-ups from 0 again: those so far were none of a client's."""
        with self._count_lock:
            self._num_keys[:] = 0
            self._num_missing[:] = 0

    def clear(self, table: str | None = None) -> None:
        """Drop all rows of a table; None: of all tables."""
        for name in self.dims if table is None else (table,):
            self.erase(name, self.dump(name))

    def refresh(self, table: str, fetch: Fetch) -> None:
        """Read the cached rows of a table again, from below; a row that is no longer there is erased.

        Look-ups go on meanwhile. `fetch` gets NumPy arrays. For one writer: an `update` that comes between a fetch and
        its result is lost.
        """
        keys = self._dump_to_host(table)
        for begin in range(0, len(keys), _KEYS_PER_REFRESH):
            part = keys[begin : begin + _KEYS_PER_REFRESH]
            vectors = np.empty((len(part), self.dims[table]), np.float32)
            found = fetch(part, vectors)
            self.update(table, part[found], vectors[found])
            self.erase(table, part[~found])

    def _dump_to_host(self, table: str) -> NDArray[np.int64]:
        """`dump`, as a NumPy array."""
        return self.dump(table)

    def __enter__(self: Cache) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, table: str) -> int:
        """The embedding_dim of a table, while the cache is open."""
        if self._closed:
            raise SessionClosedError("the embedding cache has been closed")
        if table not in self.dims:
            known = ", ".join(map(repr, self.dims)) or "none"
            raise TableNotFoundError(f"the embedding cache has no table {table!r}; its tables: {known}")
        return self.dims[table]

    def _checked_keys(self, table: str, keys: ArrayLike) -> NDArray[np.int64]:
        """Keys as int64 [n], at any distance."""
        self._check(table)
        array = np.asarray(keys)
        check_keys(table, array)
        return array.astype(np.int64, copy=False)

    def _checked_rows(
        self, table: str, keys: ArrayLike, vectors: ArrayLike
    ) -> tuple[NDArray[np.int64], NDArray[np.floating[Any]]]:
        """Keys as int64 [n] and vectors as floats [n, embedding_dim]."""
        checked = self._checked_keys(table, keys)
        array = np.asarray(vectors)
        check_vectors(table, array, (len(checked), self.dims[table]))
        return checked, array

    @abstractmethod
    def _row_counts(self, table: str) -> dict[str, int]:
        """What `stats` says of a table under ROW_COUNTS, at one moment."""

    def _output(self, table: str, num_keys: int, out: Mapping[str, NDArray[np.float32]] | None) -> NDArray[np.float32]:
        """The array that takes a table's vectors."""
        if out is None:
            return np.zeros((num_keys, self.dims[table]), np.float32)
        if table not in out:
            raise InvalidRequestError(f"out has no array for table {table!r}, whose keys are looked up")
        return self._checked_out(table, num_keys, out[table])

    def _checked_out(self, table: str, num_keys: int, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """`out` of a look-up, once it can take the vectors."""
        shape = (num_keys, self.dims[table])
        if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
            found = f"{out.dtype} {list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
            raise InvalidRequestError(f"table {table!r}: out is {found}, expected float32 {list(shape)}")
        if not out.flags.writeable or (out.size and out.strides[1] != out.itemsize):
            raise InvalidRequestError(f"table {table!r}: out must be writeable, the elements of a row adjacent")
        return out


def check_keys(table: str, keys: Any) -> None:
    """InvalidRequestError for keys, NumPy's or CuPy's, that are not int64 [n] or narrower."""
    if keys.ndim != 1 or (keys.size and not np.can_cast(keys.dtype, np.int64, "safe")):
        raise InvalidRequestError(
            f"table {table!r}: keys are {keys.dtype} {list(keys.shape)}, expected int64 or narrower integers [n]"
        )


def check_vectors(table: str, vectors: Any, shape: tuple[int, int]) -> None:
    """InvalidRequestError for vectors, NumPy's or CuPy's, that are not floats of that shape."""
    if vectors.shape != shape or not np.issubdtype(vectors.dtype, np.floating):
        raise InvalidRequestError(
            f"table {table!r}: vectors are {vectors.dtype} {list(vectors.shape)},"
            f" expected floats {list(shape)} for {shape[0]} keys"
        )


def check_backing(table: str, keys: Any, vectors: Any, dim: int) -> None:
    """ConfigurationError for backing rows, NumPy's or CuPy's, that are not int64 [n] and float32 [n, dim]."""
    if keys.ndim != 1 or (keys.size and not np.can_cast(keys.dtype, np.int64, "safe")):
        raise ConfigurationError(
            f"backing of table {table!r}: keys are {keys.dtype} {list(keys.shape)}, expected int64 [n]"
        )
    if vectors.dtype != np.float32 or vectors.shape != (len(keys), dim):
        raise ConfigurationError(
            f"backing of table {table!r}: vectors are {vectors.dtype} {list(vectors.shape)},"
            f" expected float32 {[len(keys), dim]}"
        )


def check_range(table: str, vectors: Any, dtype: VectorType, array_module: Any) -> None:
    """InvalidRequestError for vectors, of that array module, with elements that rows of `dtype` cannot hold."""
    if dtype == "int8" and not array_module.isfinite(vectors).all():
        what = "NaN or infinite elements, which int8 cannot hold"
    elif dtype == "float16" and (array_module.abs(vectors) >= _FLOAT16_END)[array_module.isfinite(vectors)].any():
        what = "an element beyond the range of float16 (65504)"
    else:
        return
    raise InvalidRequestError(f"table {table!r}: vectors hold {what}; a float32 cache can")
