"""Which tables lie in the memory of GPUs, and how much of it they take. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from inference_session.errors import ConfigurationError
from inference_session.kernels.cuda.records import MAX_SHARDS, buckets_for_all, index_bytes
from inference_session.model_spec import TableSpec

Place: TypeAlias = Literal["device", "shards", "host"]
"""Where the vectors of a table lie: all of them on each GPU, a part of them on each GPU, or in pinned host memory."""
Shard: TypeAlias = Literal["auto", "rows", "none"]
"""The setting `shard`."""


def vectors_bytes(table: TableSpec) -> int:
    """Bytes of a table's vectors, on the device or in pinned host memory."""
    return table.num_rows * table.row_bytes


def shard_bytes(table: TableSpec, num_devices: int) -> int:
    """Bytes of the largest part of a table's vectors that one of this many GPUs has."""
    return -(-table.num_rows // num_devices) * table.row_bytes


def index_bytes_on_device(table: TableSpec) -> int:
    """Bytes of a table's index, which is on the device wherever the vectors are; one in twenty is a little larger."""
    if table.keys == "row_number" or not table.num_rows:
        return 0
    return index_bytes(buckets_for_all(table.num_rows), marks=False, numbers=True)


def bytes_on_device(table: TableSpec) -> int:
    """Bytes of a table that is on the device with its index."""
    return vectors_bytes(table) + index_bytes_on_device(table)


def bytes_on_each(tables: Sequence[TableSpec], places: Sequence[Place], num_devices: int) -> int:
    """Bytes of all tables in these places on one GPU, with indexes, and the largest shards."""
    return sum(
        index_bytes_on_device(table) + _vectors_on_each(table, place, num_devices)
        for table, place in zip(tables, places, strict=True)
    )


def places_of(tables: Sequence[TableSpec], budget: int, num_devices: int, shard: Shard = "auto") -> list[Place]:
    """Where the vectors of each table lie, within this many bytes on each GPU for vectors and indexes.

    Indexes lie on each GPU in any case. If the vectors do not fit, the largest tables are sharded, as few as possible;
    if shards of all do not fit, the largest tables stay in host memory. With `rows` all tables are sharded, whatever
    the budget; with `none`, or with `auto` and more than MAX_SHARDS devices, no table is.

    Raises:
        ConfigurationError: with `rows`, there are more than MAX_SHARDS devices.
    """
    if num_devices > 1 and shard == "rows":
        if num_devices > MAX_SHARDS:
            raise ConfigurationError(
                f"shard=rows divides rows among {MAX_SHARDS} GPUs at most, not {num_devices}: name fewer GPUs in device"
            )
        return ["shards" if table.num_rows else "device" for table in tables]
    may_shard = 1 < num_devices <= MAX_SHARDS and shard == "auto"
    places: list[Place] = ["shards" if may_shard and table.num_rows else "device" for table in tables]
    largest_first = sorted(range(len(tables)), key=lambda t: vectors_bytes(tables[t]), reverse=True)
    for t in largest_first:
        if tables[t].num_rows and bytes_on_each(tables, places, num_devices) > budget:
            places[t] = "host"
    for t in reversed(largest_first):  # the smallest tables get a copy on each GPU while there is room
        if places[t] == "shards":
            places[t] = "device"
            if bytes_on_each(tables, places, num_devices) > budget:
                places[t] = "shards"
                break
    return places


def _vectors_on_each(table: TableSpec, place: Place, num_devices: int) -> int:
    return {"device": vectors_bytes(table), "shards": shard_bytes(table, num_devices), "host": 0}[place]
