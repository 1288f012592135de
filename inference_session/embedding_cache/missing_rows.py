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
        """Collect the keys at `positions`, counts[s] of them of segment s."""
        self.segments = segments
        self.counts = counts
        self.positions = positions
        num_keys = np.bincount(segments["table"], counts, len(dims)).astype(np.int64)
        self._begins = np.cumsum(num_keys) - num_keys
        num_buckets = num_keys // _KEYS_PER_BUCKET + 1
        buckets_before = np.cumsum(num_buckets) - num_buckets
        self._buckets = zeros_at_line(int(num_buckets.sum()), BUCKET_BYTES)
        self._keys = np.empty(len(positions), np.int64)
        self._found = np.zeros(len(positions), np.bool_)
        self.row_numbers = np.empty(len(positions), np.int64)
        """For each position, the row of its key among those of its table."""
        self.records = empty_tables(dims)
        self.records["num_buckets"] = num_buckets
        self.records["index_address"] = address_of(self._buckets) + BUCKET_BYTES * buckets_before
        self.records["keys_address"] = address_of(self._keys) + 8 * self._begins
        collect_keys(segments, counts, positions, self.records, self.row_numbers)
        self.by_table = self._allocate(dims)
        self.moment = -1
        """The write log's moment before the vectors were fetched; -1: not fetched yet."""

    @property
    def is_fetched(self) -> bool:
        """Whether the vectors are those of the parameter server, as far as it has any."""
        return self.moment >= 0

    def write(self, num_unknown: NDArray[np.int64]) -> None:
        """Copy the vectors to the outputs that are not pooled; num_unknown[s] receives the keys not found."""
        missing = (self.segments, self.counts, self.positions)
        write_vectors(*missing, self.records, self.row_numbers, self._found, self._begins, num_unknown)

    def num_unknown(self) -> NDArray[np.int64]:
        """Per segment, the keys that were not found."""
        segments = np.repeat(np.arange(len(self.counts)), self.counts)
        rows = self._begins[self.segments["table"][segments]] + self.row_numbers
        return np.bincount(segments, ~self._found[rows], len(self.counts)).astype(np.int64)

    def _allocate(self, dims: NDArray[np.int64]) -> dict[int, TableRows]:
        """Room for the vectors of the missing keys, by table."""
        num_rows = self.records["num_rows"]
        num_elements = num_rows * dims
        ends = np.cumsum(num_elements)
        self.vectors = np.empty(num_elements.sum(), np.float32)
        self.records["vectors_address"] = address_of(self.vectors) + 4 * (ends - num_elements)
        parts = {}
        for t in np.flatnonzero(num_rows).tolist():
            rows = slice(self._begins[t], self._begins[t] + num_rows[t])
            vectors = self.vectors[ends[t] - num_elements[t] : ends[t]].reshape(-1, dims[t])
            parts[t] = TableRows(self._keys[rows], vectors, self._found[rows])
        return parts
