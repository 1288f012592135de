"""The rows that a look-up did not find in a cache, as tables that the kernel reads after those of the cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.device.host import zeros_at_line
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES
from inference_session.kernels.cpu.missing import collect_keys, write_vectors
from inference_session.kernels.records import TABLE, address_of

_KEYS_PER_BUCKET = 8
_EMPTY_BUCKET = np.zeros(BUCKET_BYTES, np.uint8)


def empty_tables(dims: NDArray[np.int64]) -> NDArray[np.void]:
    """TABLE records of tables of these embedding_dims that have no rows and no default vectors."""
    records = np.zeros(len(dims), TABLE)
    records["index_address"], records["num_buckets"] = address_of(_EMPTY_BUCKET), 1
    records["embedding_dim"], records["row_bytes"] = dims, 4 * dims
    records["next_table"] = -1
    return records


class TableRows(NamedTuple):
    """The missing rows of one table."""

    keys: NDArray[np.int64]
    """[n], each once."""
    vectors: NDArray[np.float32]
    """[n, embedding_dim], to be filled in."""
    found: NDArray[np.bool_]
    """[n], to be filled in: False where the vector is the default."""


class MissingRows:
    """The keys that a look-up did not find, each once per table, and room for their rows (kernels/cpu/missing.py)."""

    def __init__(
        self,
        dims: NDArray[np.int64],
        segments: NDArray[np.void],
        counts: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Collect the keys at `positions`, int64 [missing], counts[s] of them of segment s; dims: int64 [tables]."""
        self.segments = segments
        self.counts = counts
        self.positions = positions
        num_keys = np.bincount(segments["table"], counts, len(dims)).astype(np.int64)
        self.first_keys = np.cumsum(num_keys) - num_keys
        """Where each table's keys begin in `keys`."""
        num_buckets = num_keys // _KEYS_PER_BUCKET + 1
        buckets_before = np.cumsum(num_buckets) - num_buckets
        self._buckets = zeros_at_line(int(num_buckets.sum()), BUCKET_BYTES)
        self.keys = np.empty(len(positions), np.int64)
        """The keys of all tables, each once per table; between those of two tables there may be room."""
        self._found = np.zeros(len(positions), np.bool_)
        self.row_numbers = np.empty(len(positions), np.int64)
        """For each position, the row of its key among those of its table."""
        self.records = empty_tables(dims)
        self.records["num_buckets"] = num_buckets
        self.records["index_address"] = address_of(self._buckets) + BUCKET_BYTES * buckets_before
        self.records["keys_address"] = address_of(self.keys) + 8 * self.first_keys
        collect_keys(segments, counts, positions, self.records, self.row_numbers)
        self.by_table = self._allocate(dims)
        self.moment = -1
        """The write log's moment before the vectors were fetched; -1: not fetched yet."""

    @property
    def num_rows(self) -> NDArray[np.int64]:
        """Of each table, int64 [tables]."""
        return self.records["num_rows"]

    @property
    def is_fetched(self) -> bool:
        """Whether the vectors are those of the parameter server, as far as it has any."""
        return self.moment >= 0

    @property
    def all_found(self) -> bool:
        """Whether the parameter server has all rows."""
        return int(self._found.sum()) == int(self.num_rows.sum())

    def drop(self, table: int, rows: NDArray[np.bool_]) -> None:
        """Forget some rows of a table, bool [n]; those that are left take their places. Outputs must be written."""
        keys, vectors, found = self.by_table[table]
        num_left = int(len(rows) - rows.sum())
        for array in (keys, vectors, found):
            array[:num_left] = array[~rows]
        self.by_table[table] = TableRows(keys[:num_left], vectors[:num_left], found[:num_left])
        self.num_rows[table] = num_left

    def write(self, num_unknown: NDArray[np.int64]) -> None:
        """Copy the vectors to the outputs that are not pooled; num_unknown[s] receives the keys not found."""
        missing = (self.segments, self.counts, self.positions)
        write_vectors(*missing, self.records, self.row_numbers, self._found, self.first_keys, num_unknown)

    def num_unknown(self) -> NDArray[np.int64]:
        """How many keys of each segment were not found, int64 [segments]."""
        segments = np.repeat(np.arange(len(self.counts)), self.counts)
        rows = self.first_keys[self.segments["table"][segments]] + self.row_numbers
        return np.bincount(segments, ~self._found[rows], len(self.counts)).astype(np.int64)

    def _allocate(self, dims: NDArray[np.int64]) -> dict[int, TableRows]:
        """Room for the vectors of the missing keys, by table."""
        num_rows = self.num_rows
        num_elements = num_rows * dims
        ends = np.cumsum(num_elements)
        self.first_elements = ends - num_elements
        """Where each table's vectors begin in `vectors`."""
        self.vectors = np.empty(num_elements.sum(), np.float32)
        """The vectors of all tables."""
        self.records["vectors_address"] = address_of(self.vectors) + 4 * self.first_elements
        parts = {}
        for t in np.flatnonzero(num_rows).tolist():
            rows = slice(self.first_keys[t], self.first_keys[t] + num_rows[t])
            vectors = self.vectors[self.first_elements[t] : ends[t]].reshape(-1, dims[t])
            parts[t] = TableRows(self.keys[rows], vectors, self._found[rows])
        return parts
