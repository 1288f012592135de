"""Opens the tables of a version on the GPUs that look them up, and decides where each of them lies.

The smallest tables lie in device memory, as many as fit into `cache_bytes`, or without that setting into most of the
free memory. The largest may be divided among several GPUs, each of which reads the others' memory. The rest lies in
pinned host memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import NDArray

from inference_session.device.cuda import CudaDevice
from inference_session.device.cuda_memory import check_free, memory_checked
from inference_session.device.peers import connect, unreachable
from inference_session.device.pinned import PinnedArray
from inference_session.device.placement import Place, Shard, bytes_on_each, places_of, shard_bytes
from inference_session.device.shared_memory import unshareable
from inference_session.errors import ConfigurationError
from inference_session.model_spec import TableSpec
from inference_session.platform.open_files import private_folder
from inference_session.tables.base import Placement
from inference_session.tables.cuda.local_copies import bytes_to_copy
from inference_session.tables.cuda.shared_shards import SharedShards, sharing
from inference_session.tables.cuda.table import Shards
from inference_session.tables.cuda.tables import CudaTables, pieces
from inference_session.tables.table_file import TableFile

_log = logging.getLogger(__name__)
_FREE_FRACTION = 0.8
"""The share of free device memory for tables where no setting gives it: the network and requests need some too."""


def open_cuda_tables(
    files: Sequence[TableFile],
    devices: Sequence[CudaDevice],
    *,
    cache_bytes: int | None = None,
    shard: Shard = "auto",
    shard_devices: Sequence[int] = (),
    rows_change: bool = False,
) -> list[CudaTables]:
    """The rows of table files where each of these GPUs reads them: uploaded as far as they fit, the rest pinned.

    Args:
        files: the version's; the caller closes them.
        devices: the GPUs, all alike.
        cache_bytes: most memory on each GPU for tables and their indexes; None: most of what is free.
        shard: the setting.
        shard_devices: the GPUs among which rows are divided where each has a process of its own; this one has one of
            them. Empty: `devices`.
        rows_change: whether rows may be changed later; changed rows take more memory, on each GPU.

    Raises:
        ConfigurationError: cache_bytes and the tables are more than a device has free; or there is too little memory,
            on a device for indexes or shards, or on the host for the rest; or rows are to be sharded, and the GPUs
            cannot read each other's memory.
    """
    device_ids = [*shard_devices] or [device.device_id for device in devices]
    if shard_devices and _fit(files, devices, len(device_ids), cache_bytes, shard):
        shard = "none"  # this process needs no others
    shard = _possible(shard, device_ids, in_processes=bool(shard_devices))
    if shard_devices and shard != "none":
        return _open_shared(files, devices[0], device_ids, shard, cache_bytes=cache_bytes, rows_change=rows_change)
    plan = _planned(files, devices, len(devices), cache_bytes, shard)
    connect(device_ids if "shards" in plan.places else [])
    sharded = {t: _sharded(files[t].vectors, devices) for t in plan.tables("shards")}
    return _on_all(files, devices, plan, sharded, rows_change=rows_change)


def _open_shared(
    files: Sequence[TableFile],
    device: CudaDevice,
    device_ids: Sequence[int],
    shard: Shard,
    *,
    cache_bytes: int | None,
    rows_change: bool,
) -> list[CudaTables]:
    """The tables of a process that has one of the GPUs, and reads shards from all of them."""
    with contextlib.ExitStack() as opened:
        with sharing(files, device_ids, device.device_id, (shard, cache_bytes)) as processes:
            shared = processes.received()
            if shared is not None:
                opened.callback(shared.close)
            plan = _planned(files, [device], len(device_ids), cache_bytes, shard, shared=shared)
            if shared is None and "shards" in plan.places:
                shared = processes.created(plan.places)
                opened.callback(shared.close)
                for t, arrays in shared.arrays.items():
                    _upload(files[t].vectors, arrays, [device] * len(arrays))
            if shared is not None:
                shared.offer(processes.exchange)
        # Others go on here, while this process indexes and copies the rest.
        sharded = {} if shared is None else shared.arrays
        number = device_ids.index(device.device_id)
        (tables,) = _on_all(files, [device], plan, sharded, rows_change=rows_change, first=number)
        tables.keep(opened.pop_all().close)
        return [tables]


class _Plan(NamedTuple):
    """Where the vectors of each table lie."""

    places: Sequence[Place]
    placement: Placement
    copy_bytes: Mapping[int, int]
    """By table, most memory for copies of hot rows of other GPUs."""

    def tables(self, place: Place) -> list[int]:
        return [t for t, found in enumerate(self.places) if found == place]


def _planned(
    files: Sequence[TableFile],
    devices: Sequence[CudaDevice],
    num_parts: int,
    cache_bytes: int | None,
    shard: Shard,
    *,
    shared: SharedShards | None = None,
) -> _Plan:
    """Where tables lie that are divided in this many parts; `shared`: the parts that are there."""
    specs = [file.spec for file in files]
    held = 0 if shared is None else shared.bytes_on_each
    budget, reason = _budget(cache_bytes, devices, held)
    places = places_of(specs, budget, num_parts, shard) if shared is None else shared.places
    needed = bytes_on_each(specs, places, num_parts)
    if shard == "rows" and shared is None and needed > budget:
        raise ConfigurationError(
            f"shard=rows needs {needed} bytes on each of {num_parts} GPUs, where tables may take {budget}"
            f" ({reason}): use more GPUs, or set shard=auto, which leaves the largest tables in host memory"
        )
    for device in devices:
        if cache_bytes is not None:
            with cupy.cuda.Device(device.device_id):
                check_free(min(cache_bytes, needed) - held, device.device_id)
    placement = _placement(specs, places, devices)
    if placement.on_host and cache_bytes is None:  # else it was asked for
        names = ", ".join(map(repr, placement.on_host))
        _log.warning("%s has no room for tables %s; they are read from host memory", placement.device, names)
    return _Plan(places, placement, _copy_bytes(specs, places, num_parts, budget - needed))


def _on_all(
    files: Sequence[TableFile],
    devices: Sequence[CudaDevice],
    plan: _Plan,
    sharded: Mapping[int, Sequence[Any]],
    *,
    rows_change: bool,
    first: int = 0,
) -> list[CudaTables]:
    """The tables of each device; shards, and what is pinned in host memory, exist once. `first`: its part of shards."""
    device_id, copy_bytes = devices[0].device_id, {} if rows_change else plan.copy_bytes
    with cupy.cuda.Device(device_id), memory_checked(device_id, "free some memory, or use fewer or smaller tables"):
        pinned = {t: PinnedArray(files[t].vectors) for t in plan.tables("host")}
    all_tables: list[CudaTables] = []
    try:
        for number, device in enumerate(devices, first):
            vectors: list[Any] = [None] * len(files)
            for t, memory in pinned.items():
                vectors[t] = memory.array
            for t, arrays in sharded.items():
                vectors[t] = Shards(arrays, number, files[t].spec.num_rows)
            tables = CudaTables(files, device, vectors, plan.placement, rows_change=rows_change, copy_bytes=copy_bytes)
            all_tables.append(tables)
    except BaseException:
        for tables in all_tables:
            tables.close()
        raise
    finally:
        for memory in pinned.values():
            memory.close()  # each device has pinned it for itself
    return all_tables


def _copy_bytes(specs: Sequence[TableSpec], places: Sequence[Place], num_devices: int, spare: int) -> dict[int, int]:
    """For copies of hot rows of other GPUs: by table, the most bytes on each GPU, within its spare memory."""
    those = [t for t, place in enumerate(places) if place == "shards" and specs[t].dtype == "float32"]
    sizes = {
        t: bytes_to_copy(shard_bytes(specs[t], num_devices), specs[t].row_bytes, spare // len(those)) for t in those
    }
    return {t: num_bytes for t, num_bytes in sizes.items() if num_bytes}


def _budget(cache_bytes: int | None, devices: Sequence[CudaDevice], held: int = 0) -> tuple[int, str]:
    """Bytes that tables may take on each device, of which some are held, and why."""
    if cache_bytes is not None:
        return cache_bytes, "cache_bytes"
    free = []
    for device in devices:
        with cupy.cuda.Device(device.device_id):
            free.append((cupy.cuda.runtime.memGetInfo()[0] + held, device.name))
    least, name = min(free)
    return int(least * _FREE_FRACTION), f"{name} has {least} bytes free"


def _fit(
    files: Sequence[TableFile], devices: Sequence[CudaDevice], num_parts: int, cache_bytes: int | None, shard: Shard
) -> bool:
    """Whether each GPU gets a copy of each table."""
    budget, _ = _budget(cache_bytes, devices)
    return {*places_of([file.spec for file in files], budget, num_parts, shard)} <= {"device"}


def _possible(shard: Shard, device_ids: Sequence[int], *, in_processes: bool) -> Shard:
    """The setting `shard`; where there can be no shards, `none`, or for `rows` a ConfigurationError."""
    if shard == "none":
        return shard
    reason = unreachable(device_ids) or (_unshareable(device_ids) if in_processes else None)
    if reason is None:
        return shard
    if shard == "rows":
        raise ConfigurationError(f"shard cannot be 'rows': {reason}; set shard=none, or use other GPUs")
    _log.warning("Rows are not sharded: %s", reason)
    return "none"


def _unshareable(device_ids: Sequence[int]) -> str | None:
    """Why processes cannot share memory of these GPUs; None: they can."""
    try:
        private_folder()
    except ConfigurationError as error:
        return str(error)
    return next(filter(None, map(unshareable, device_ids)), None)


def _placement(specs: Sequence[TableSpec], places: Sequence[Place], devices: Sequence[CudaDevice]) -> Placement:
    def folders(wanted: Place) -> list[str]:
        return [spec.folder for spec, place in zip(specs, places, strict=True) if place == wanted]

    name = "cuda:" + ",".join(str(device.device_id) for device in devices)
    return Placement(name, 0, folders("host"), folders("shards"))


def _sharded(rows: NDArray[Any], devices: Sequence[CudaDevice]) -> list[Any]:
    """A part of the rows on each device, as Shards says."""
    arrays = []
    for number, device in enumerate(devices):
        with cupy.cuda.Device(device.device_id), memory_checked(device.device_id, "free some memory"):
            arrays.append(cupy.empty((len(rows[number :: len(devices)]), *rows.shape[1:]), rows.dtype))
    _upload(rows, arrays, devices)
    return arrays


def _upload(rows: NDArray[Any], arrays: Sequence[Any], devices: Sequence[CudaDevice]) -> None:
    """Divide rows among arrays, each by way of a device."""
    for piece in pieces(rows, len(arrays)):
        part, begin = rows[piece], piece.start // len(arrays)
        for number, (device, array) in enumerate(zip(devices, arrays, strict=True)):
            own = np.ascontiguousarray(part[number :: len(arrays)])
            with cupy.cuda.Device(device.device_id), device.stream:
                array[begin : begin + len(own)].set(own)
    for device in devices:
        with cupy.cuda.Device(device.device_id):
            device.stream.synchronize()
