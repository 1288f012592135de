"""How a GPU cache's budget of bytes becomes rows. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference_session.errors import ConfigurationError
from inference_session.kernels.cuda.records import EVENTS, GPU_TABLE, MOST_BUCKETS, SLOTS, aligned, table_bytes
from inference_session.model_spec import bytes_per_row

_LOAD = 0.7
"""The fraction of slots that a table with a known number of rows fills: then hardly a key is evicted."""


def fixed_bytes(num_tables: int) -> int:
    """The bytes a cache takes in addition to its tables: the counts of events, and the records."""
    return aligned(num_tables * len(EVENTS) * 8) + aligned(num_tables * GPU_TABLE.itemsize)


def buckets_to_hold(num_rows: int | None) -> int:
    """Buckets such that this many rows find room, except a few by chance."""
    return MOST_BUCKETS if num_rows is None else min(int(num_rows / (SLOTS * _LOAD)) + 1, MOST_BUCKETS)


def bytes_to_hold(dims: Mapping[str, int], num_rows: Mapping[str, int]) -> int:
    """The cache_bytes that a GPU cache for this many float32 rows of each table takes."""
    tables = (table_bytes(buckets_to_hold(num_rows[t]), bytes_per_row(dim, "float32")) for t, dim in dims.items())
    return fixed_bytes(len(dims)) + sum(tables)


def buckets_per_table(cache_bytes: int, row_bytes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """The same number of buckets for each table, or its limit, such that all fit; none for 0 bytes."""
    if cache_bytes == 0:
        return [0] * len(row_bytes)

    def needed(most: int) -> int:
        sizes = [table_bytes(min(most, limit), size) for size, limit in zip(row_bytes, limits, strict=True)]
        return fixed_bytes(len(row_bytes)) + sum(sizes)

    if cache_bytes < needed(1):
        raise ConfigurationError(
            f"cache_bytes is {cache_bytes}, too little for {len(row_bytes)} tables on a GPU: set at least {needed(1)},"
            " or 0 for no cache"
        )
    low, high = 1, max(limits, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= cache_bytes else (low, middle - 1)
    return [min(low, limit) for limit in limits]
