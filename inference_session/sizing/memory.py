"""The memory that serving a version takes, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from inference_session.device.placement import Shard, index_bytes_on_device, places_of, shard_bytes, vectors_bytes
from inference_session.model_spec import NETWORK_FILES, TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.tables.table_index import index_bytes

MemoryKind = Literal["page cache", "process", "device", "shared memory"]

PROCESS_BYTES = 80 << 20
"""Private memory of a serving process before any model: Python, NumPy, Numba's kernels, ONNX Runtime (as measured)."""
SHARED_MEMORY_BYTES = 1 << 20
"""Shared memory in /dev/shm that Triton's Python backend sets up per process, without requests and answers."""

_BLOCK_BYTES, _ROW_OVERHEAD_BYTES = 1024, 19
"""Of RocksDB's files: a block ends with the row that fills it."""
_FILTER_BYTES, _INDEX_BYTES = 1.25, 15
"""What RocksDB has in memory for each row, and for each block (as measured)."""


class MemoryItem(NamedTuple):
    """One part of the memory that a served version takes."""

    name: str
    place: MemoryKind
    """`page cache`: mapped files, which all processes of a machine share, and that are read again after memory was
    short. `shared memory`: /dev/shm."""
    each_bytes: int
    """Bytes of one copy."""
    copies: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all copies on the machine."""
        return self.each_bytes * self.copies


def memory_items(
    spec: ModelSpec,
    version_dir: Path,
    *,
    cache_bytes: int,
    num_processes: int = 1,
    num_devices: int = 0,
    rows_on_device: bool = False,
    cache_on_device: bool = False,
    in_rocksdb: bool = False,
    shard: Shard = "none",
) -> list[MemoryItem]:
    """The memory of one version; during a swap two versions are loaded, each with all of it.

    Args:
        spec: of the version.
        version_dir: where its networks are, and its tables unless only its stores have them.
        cache_bytes: of each process; with `rows_on_device`, what tables and indexes may take of each device.
        num_processes: that serve the version.
        num_devices: GPUs that hold the network; 0: the processes do.
        rows_on_device: whether the devices look rows up, instead of the processes.
        cache_on_device: whether the devices have the cache over stores, instead of the processes.
        in_rocksdb: whether the persistent store is a RocksDB.
        shard: the setting; whether one process has all devices, or each has one, they share the shards.
    """
    tables = spec.tables if (version_dir / TABLES_FOLDER).is_dir() else ()
    stored = [table.num_rows for table in tables if table.keys == "stored"]
    rocksdb = sum(map(rocksdb_bytes, spec.tables))
    networks = sum(_file_bytes(version_dir / name) for name in NETWORK_FILES)
    place: MemoryKind = "device" if num_devices else "process"
    copies = num_devices or num_processes
    return [
        MemoryItem("vectors", "page cache", sum(map(vectors_bytes, tables)), 1),
        MemoryItem("keys", "page cache", 8 * sum(stored), 1),
        MemoryItem("index", "page cache", sum(map(index_bytes, stored)), 1),
        *(_rows_on_device(tables, cache_bytes, num_devices, num_processes, shard) if rows_on_device else ()),
        MemoryItem("cache", "device", cache_bytes, num_devices)
        if cache_on_device
        else MemoryItem("cache", "process", 0 if rows_on_device else cache_bytes, num_processes),
        *([MemoryItem("RocksDB", "process", rocksdb, num_processes)] if in_rocksdb else ()),
        MemoryItem("dense network", place, networks, copies),
        MemoryItem("program", "process", PROCESS_BYTES, num_processes),
        MemoryItem("tensors", "shared memory", SHARED_MEMORY_BYTES, num_processes),
    ]


def _rows_on_device(
    tables: Sequence[TableSpec], cache_bytes: int, num_devices: int, num_processes: int, shard: Shard
) -> list[MemoryItem]:
    """The memory of tables that GPUs look up; tables that do not fit are pinned in host memory."""
    places = places_of(tables, cache_bytes, num_devices, shard)
    copied, shards, pinned = (
        [table for table, place in zip(tables, places, strict=True) if place == wanted]
        for wanted in ("device", "shards", "host")
    )
    share = sum(shard_bytes(table, num_devices) for table in shards)
    return [
        MemoryItem("vectors on device", "device", sum(map(vectors_bytes, copied)), num_devices),
        *([MemoryItem("shards on device", "device", share, num_devices)] if shards else ()),
        MemoryItem("index on device", "device", sum(map(index_bytes_on_device, tables)), num_devices),
        MemoryItem("pinned vectors", "process", sum(map(vectors_bytes, pinned)), num_processes),
    ]


def rocksdb_bytes(table: TableSpec) -> int:
    """The filters and indexes that a process keeps of a table in a RocksDB whose files have been merged."""
    rows_per_block = math.ceil(_BLOCK_BYTES / (4 * table.embedding_dim + _ROW_OVERHEAD_BYTES))
    return round(_FILTER_BYTES * table.num_rows) + _INDEX_BYTES * math.ceil(table.num_rows / rows_per_block)


def bytes_in(items: Iterable[MemoryItem], place: MemoryKind) -> int:
    """The bytes of one process or device; for `page cache`, those of the machine."""
    return sum(item.each_bytes for item in items if item.place == place)


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
