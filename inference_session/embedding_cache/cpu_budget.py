"""How a CPU cache's budget of bytes becomes rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inference_session.device.host import LINE_BYTES
from inference_session.errors import ConfigurationError
from inference_session.kernels.cpu.cache import NUM_EVENTS, NUM_LISTS
from inference_session.kernels.cpu.hash_index import BUCKET_BYTES, MAX_ROWS
from inference_session.kernels.records import TABLE
from inference_session.model_spec import bytes_per_row

GHOSTS_PER_ROW = 2
_ROWS_PER_BUCKET = 6
"""Half of its slots, so that a bucket hardly ever overflows."""
_SPARE_PARTS, _MAX_SPARE_ROWS = 16, 4096
"""One row in this many is kept free for writers, up to a limit."""
_MOST_ROWS = MAX_ROWS - NUM_LISTS


def bytes_to_hold(dims: Mapping[str, int], num_rows: Mapping[str, int]) -> int:
    """The cache_bytes that a cache for this many float32 rows of each table takes."""
    return allocated_bytes(dims, {table: rows_to_hold(num_rows[table]) for table in dims})


def allocated_bytes(dims: Mapping[str, int], rows: Mapping[str, int]) -> int:
    """The memory of tables with these many rows each, spare ones included."""
    return _total_bytes([rows[table] for table in dims], [row_bytes(dim) for dim in dims.values()])


def rows_held(dims: Mapping[str, int], cache_bytes: int, num_rows: Mapping[str, int] | None = None) -> dict[str, int]:
    """The float32 rows of each table that a cache of this many bytes keeps; ConfigurationError if it keeps none."""
    rows = rows_per_table(dims, cache_bytes, num_rows)
    return {table: n - spare_rows(n) for table, n in rows.items()}


def rows_per_table(dims: Mapping[str, int], cache_bytes: int, num_rows: Mapping[str, int] | None) -> dict[str, int]:
    """Rows, spare ones included: the same number for each table, or all that it needs, such that all fit.

    Raises:
        ConfigurationError: there is no room for a row of each table.
    """
    sizes = [row_bytes(dim) for dim in dims.values()]
    limits = [rows_to_hold((num_rows or {}).get(table, _MOST_ROWS)) for table in dims]
    least = _total_bytes([2] * len(dims), sizes)
    if cache_bytes < least:
        raise ConfigurationError(
            f"cache_bytes is {cache_bytes}, too little for {len(dims)} tables: set at least {least}, or 0 for no cache"
        )
    low, high = 2, max(limits, default=2)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _total_bytes([min(middle, limit) for limit in limits], sizes) <= cache_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return {table: min(low, limit) for table, limit in zip(dims, limits, strict=True)}


def row_bytes(dim: int) -> int:
    """Of a vector of this many elements: caches hold float32."""
    return bytes_per_row(dim, "float32")


def rows_to_hold(num_rows: int) -> int:
    """Rows, spare ones included, that a table of this many rows needs."""
    return min(num_rows + min(num_rows // (_SPARE_PARTS - 1), _MAX_SPARE_ROWS) + 2, _MOST_ROWS)


def spare_rows(num_rows: int) -> int:
    """How many of a table's rows are kept free for writers."""
    return min(max(num_rows // _SPARE_PARTS, 1), _MAX_SPARE_ROWS)


def buckets_of(num_rows: int) -> int:
    """Buckets of the index of a table with this many rows."""
    return -(-num_rows // _ROWS_PER_BUCKET)


def table_bytes(num_rows: int, size: int) -> int:
    """The memory of a table with this many rows of `size` bytes."""
    per_row = size + 8 + 1 + 1 + 2 * 4 + 2 * GHOSTS_PER_ROW
    heads_and_counts = NUM_LISTS * (2 * 4 + 8) + 8 * NUM_EVENTS
    return buckets_of(num_rows) * BUCKET_BYTES + num_rows * per_row + heads_and_counts + 2 * LINE_BYTES + TABLE.itemsize


def _total_bytes(num_rows: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(table_bytes(n, size) for n, size in zip(num_rows, sizes, strict=True))
