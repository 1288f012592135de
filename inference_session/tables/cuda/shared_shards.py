"""Shards of tables that several processes read, each of which has one of the GPUs.

Who comes first puts the rows into the memory of all GPUs and says where tables lie; the others map that memory. It
stays until the last of the processes has closed the tables. So a process that is started again finds the rows in place,
as does another one that serves the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cupy.cuda import runtime
from numpy.typing import NDArray

from inference_session.device.placement import Place, shard_bytes
from inference_session.device.shared_memory import SharedMemory
from inference_session.errors import ConfigurationError
from inference_session.platform.open_files import FileExchange, FileOffer, OpenFiles, close_all
from inference_session.tables.table_file import TableFile

_ALIGNMENT = 512
_FORMAT = 1
"""Of what processes pass to each other; those of another number do not meet."""


class SharedShards:
    """The shards of a version's tables, mapped for the GPU of this process."""

    def __init__(self, files: Sequence[TableFile], places: Sequence[Place], memories: Sequence[SharedMemory]) -> None:
        """`memories`: one of each GPU."""
        self.places, self._memories = places, memories
        begins, self.bytes_on_each = _layout(files, places, len(memories))
        self.arrays = {t: self._arrays(files[t].vectors, begin) for t, begin in begins.items()}
        """By number of the table: a part of its rows on each GPU, as `Shards` says."""
        self._offer: FileOffer | None = None

    def offer(self, exchange: FileExchange) -> None:
        """Pass the memory to other processes that ask for it."""
        descriptors = [memory.descriptor for memory in self._memories]
        self._offer = exchange.offer(OpenFiles(json.dumps(self.places).encode(), descriptors))

    def close(self) -> None:
        """Give the memory back, as far as this process goes. No look-up may be running."""
        if self._offer is not None:
            self._offer.close()
        self.arrays = {}
        for memory in self._memories:
            memory.close()

    def _arrays(self, rows: NDArray[Any], begin: int) -> list[Any]:
        count = len(self._memories)
        return [
            memory.array(begin, (len(rows[number::count]), *rows.shape[1:]), rows.dtype)
            for number, memory in enumerate(self._memories)
        ]


class Sharing(NamedTuple):
    """What processes have to agree about, and the GPU of this one."""

    files: Sequence[TableFile]
    device_ids: Sequence[int]
    """The GPUs among which rows are divided."""
    own: int
    """The current device."""
    exchange: FileExchange

    def received(self) -> SharedShards | None:
        """The shards as another process has them; None where no process has them."""
        found = self.exchange.ask()
        if found is None:
            return None
        try:
            places: list[Place] = json.loads(found.description)
            if len(found.descriptors) != len(self.device_ids) or len(places) != len(self.files):
                raise ConfigurationError("another process shares rows of other tables, or of other GPUs")
            return self._mapped(places, found.descriptors)
        finally:
            close_all(found.descriptors)

    def created(self, places: Sequence[Place]) -> SharedShards:
        """Memory for the shards on all GPUs, without their rows.

        Raises:
            ConfigurationError: a GPU has too little memory, or cannot share it.
        """
        return self._mapped(places, None)

    def _mapped(self, places: Sequence[Place], descriptors: Sequence[int] | None) -> SharedShards:
        _, num_bytes = _layout(self.files, places, len(self.device_ids))
        with contextlib.ExitStack() as opened:
            memories = []
            for number, device_id in enumerate(self.device_ids):
                if descriptors is None:
                    memory = SharedMemory.create(num_bytes, device_id, self.own)
                else:
                    memory = SharedMemory.opened(descriptors[number], num_bytes, device_id, self.own)
                opened.callback(memory.close)
                memories.append(memory)
            shared = SharedShards(self.files, places, memories)
            opened.pop_all()
        return shared


@contextlib.contextmanager
def sharing(
    files: Sequence[TableFile], device_ids: Sequence[int], own: int, settings: Sequence[object]
) -> Iterator[Sharing]:
    """Keep out other processes that open the same tables, on the same GPUs and with the same settings.

    Raises:
        ConfigurationError: processes cannot pass memory to each other.
    """
    gpus = [runtime.getDeviceProperties(device_id)["uuid"].hex() for device_id in device_ids]
    name = hashlib.sha256(json.dumps([_FORMAT, gpus, list(map(_identity, files)), *settings]).encode()).hexdigest()[:32]
    exchange = FileExchange(name)
    with exchange.turn():
        yield Sharing(files, device_ids, own, exchange)


def _identity(file: TableFile) -> list[object]:
    """Of a table's rows: the file that is mapped, by whatever name; rows in no file are nobody else's.

    st_ctime is left out: it changes where a new version links to files of this one.
    """
    stat, rows = file.stat, file.vectors
    where = [secrets.token_hex(16)] if stat is None else [stat.st_dev, stat.st_ino, stat.st_mtime_ns]
    return [*where, str(rows.dtype), *rows.shape]


def _layout(files: Sequence[TableFile], places: Sequence[Place], num_devices: int) -> tuple[dict[int, int], int]:
    """Where the shard of each divided table begins in the memory of each GPU, and how large that is."""
    begins, end = {}, 0
    for t, (file, place) in enumerate(zip(files, places, strict=True)):
        if place == "shards":
            begins[t] = end
            end += -(-shard_bytes(file.spec, num_devices) // _ALIGNMENT) * _ALIGNMENT
    return begins, end
