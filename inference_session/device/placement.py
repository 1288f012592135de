"""Which tables lie in a GPU's memory, and how much of it they take. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from inference_session.kernels.cuda.records import buckets_for_all, index_bytes
from inference_session.model_spec import TableSpec


def vectors_bytes(table: TableSpec) -> int:
    """Of a table's vectors, on the device or in pinned host memory."""
    return table.num_rows * table.row_bytes


def index_bytes_on_device(table: TableSpec) -> int:
    """Of the index of a table with keys, on the device wherever the vectors are; one in twenty is a little larger."""
    if table.keys == "row_number" or not table.num_rows:
        return 0
    return index_bytes(buckets_for_all(table.num_rows), marks=False, numbers=True)


def bytes_on_device(table: TableSpec) -> int:
    """Of a table that lies there with its index."""
    return vectors_bytes(table) + index_bytes_on_device(table)


def placed_on_device(tables: Sequence[TableSpec], budget: int) -> list[bool]:
    """Whether the vectors of each get a place within so many bytes, the smallest first, beside all their indexes."""
    placed = [False] * len(tables)
    for t in sorted(range(len(tables)), key=lambda t: vectors_bytes(tables[t])):
        placed[t] = vectors_bytes(tables[t]) <= budget
        budget -= index_bytes_on_device(tables[t]) + placed[t] * vectors_bytes(tables[t])
    return placed
