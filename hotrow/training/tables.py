"""Embedding tables of a live model: which part of each this rank holds, and how it is written to a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_session.errors import UnsupportedModelError

_CHUNK_BYTES = 32 << 20
_FILE_TYPES = {torch.float32: "float32", torch.float16: "float16"}
"""How vectors are stored; those of other types become float32."""


class Shard(NamedTuple):
    """A part of a table that this rank holds."""

    first_row: int
    first_column: int
    tensor: Tensor


class KnownKeys(NamedTuple):
    """The keys of the rows that one rank holds."""

    keys: Tensor
    """int64 [n], each once."""
    rows: Tensor
    """int64 [n], numbers of their rows in the whole table."""
    unknown_row: int
    """The row that answers all other keys of this rank."""
    num_served: int
    """How many of them are served: the last one may be a filler, which another rank has as well."""


@dataclass
class Table:
    """One embedding table of the model."""

    name: str
    path: str
    """The path of its module, for messages."""
    num_rows: int
    embedding_dim: int
    dtype: torch.dtype
    weight: Callable[[], Any]
    """The weights as the module has them: a tensor, or one of torch's sharded kinds, of which this rank has a part."""
    device: torch.device
    known: Callable[[], KnownKeys] | None = None
    """The keys of this rank's rows, if rows are found by arbitrary keys, not by their numbers."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """The mapping of raw ids before they are looked up among the keys."""
    shards_of: Callable[[Tensor], Tensor] | None = None
    """The shard of each prepared id, of a table with managed collisions in several shards."""
    unknown_vectors: Tensor | None = field(default=None, repr=False)
    """[shards, embedding_dim], the answers to unknown ids, while such a table's network is traced."""
    hash_table: Any = None
    """The `HashTable` whose rows these are."""
    placeholder: Tensor | None = field(default=None, repr=False)
    """Stands for the table's weights while the network is traced."""

    @property
    def has_keys(self) -> bool:
        """Whether rows are found by keys that are stored, not by their numbers."""
        return self.known is not None

    def known_keys(self) -> KnownKeys:
        """The keys of this rank's rows.

        Raises:
            UnsupportedModelError: rows of this table are found by their numbers.
        """
        if self.known is None:
            raise UnsupportedModelError(f"{self.path}: rows of table {self.name!r} have no keys")
        return self.known()

    @property
    def file_type(self) -> str:
        """NumPy's name of the type of the vectors in the file."""
        return _FILE_TYPES.get(self.dtype, "float32")

    @property
    def row_bytes(self) -> int:
        """The bytes of a vector in the file."""
        return self.embedding_dim * np.dtype(self.file_type).itemsize

    @property
    def unknown_value(self) -> float:
        """Each element of the default vector of a table that has an unknown vector for each of its shards."""
        return torch.finfo(getattr(torch, self.file_type)).min

    def shards(self) -> list[Shard]:
        """The parts that this rank holds.

        Raises:
            UnsupportedModelError: the weight is of a kind that is not known here.
        """
        return local_shards(self.weight(), self.path)

    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        weight = self.weight()
        if hasattr(weight, "device_mesh"):
            return all(placement.is_replicate() for placement in weight.placements)
        return isinstance(weight, Tensor) and not _is_sharded(weight)

    def stand_in(self, num_rows: int) -> Tensor:
        """A tensor of that many rows that takes no memory."""
        return torch.zeros(1, dtype=getattr(torch, self.file_type), device=self.device).expand(
            num_rows, self.embedding_dim
        )


def local_shards(weight: Any, path: str) -> list[Shard]:
    """The parts of a weight that this rank holds; none of a table that is on other ranks.

    Raises:
        UnsupportedModelError: the weight is of a kind that is not known here.
    """
    if weight is None:
        return []
    if _is_sharded(weight):
        return [_shard(shard.metadata.shard_offsets, shard.tensor) for shard in weight.local_shards()]
    if hasattr(weight, "device_mesh"):  # torch's DTensor
        return _shards_of_dtensor(weight, path)
    if type(weight).__name__ not in ("Tensor", "Parameter", "Buffer", "TableBatchedEmbeddingSlice"):
        raise UnsupportedModelError(f"{path}: a weight of type {type(weight).__name__} cannot be read")
    return [Shard(0, 0, weight.detach())]


def _is_sharded(weight: Any) -> bool:
    """Whether it is torch's ShardedTensor, which DTensor replaces in newer releases."""
    return hasattr(weight, "local_shards") and hasattr(weight, "metadata")


def _shards_of_dtensor(weight: Any, path: str) -> list[Shard]:
    local = weight.to_local()
    if hasattr(local, "local_shards"):  # TorchRec's wrapper
        parts = zip(local.local_offsets(), local.local_shards(), strict=True)
        return [_shard(offsets, tensor) for offsets, tensor in parts]
    if any(placement.is_partial() for placement in weight.placements):
        raise UnsupportedModelError(f"{path}: its weight is a partial DTensor, whose values are not on any one rank")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return [_shard(offsets, local)]


def _shard(offsets: Any, tensor: Tensor) -> Shard:
    first_row, first_column = [*offsets, 0][:2]
    return Shard(int(first_row), int(first_column), tensor.detach())


def create_file(path: Path, num_bytes: int) -> None:
    """A file of that size, to be filled by several ranks. Its room is taken now: on a full disk, this is an OSError,
    and a write through a mapping would end the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)


class FileWriter:
    """Writes parts of an existing file. Computes their checksum and writes them to disk meanwhile."""

    def __init__(self, path: Path, *, hashed: bool) -> None:
        """`hashed`: whether all of the file will be written here, in order, so that its checksum is known."""
        self._path = path
        self._digest = hashlib.sha256() if hashed else None
        self._background = ThreadPoolExecutor(2)
        self._hashing: Future[Any] = self._background.submit(int)
        self._flushing: Future[Any] = self._hashing

    def __enter__(self) -> FileWriter:
        self._handle = os.open(self._path, os.O_WRONLY)
        return self

    def __exit__(self, *_error: object) -> None:
        self._background.shutdown()
        os.close(self._handle)

    def write(self, offset: int, array: NDArray[Any]) -> None:
        """Write the elements of an array of any shape from that byte on; it must not change before the next call."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._hashing.result()  # one piece at a time, so that few are held
        if self._digest is not None:
            self._hashing = self._background.submit(self._digest.update, content)
        while content:
            written = os.pwrite(self._handle, content, offset)
            content, offset = content[written:], offset + written
        if self._flushing.done():
            self._flushing.result()
            self._flushing = self._background.submit(os.fdatasync, self._handle)

    def finish(self) -> str | None:
        """Wait until all is written; returns the SHA-256 if it was to be computed."""
        self._hashing.result()
        self._flushing.result()
        return None if self._digest is None else self._digest.hexdigest()


def write_table(path: Path, table: Table, shards: Sequence[Shard]) -> str | None:
    """Write the parts of a table that this rank holds; returns the file's SHA-256 where that is all of it."""
    whole = (table.num_rows, table.embedding_dim)
    with FileWriter(path, hashed=[tuple(shard.tensor.shape) for shard in shards] == [whole]) as file:
        for shard in shards:
            if shard.tensor.shape[1] == table.embedding_dim:
                for first_row, vectors in _pieces(table, shard):
                    file.write((shard.first_row + first_row) * table.row_bytes, vectors)
            else:
                _write_columns(path, table, shard)
        return file.finish()


def _write_columns(path: Path, table: Table, shard: Shard) -> None:
    mapped = np.memmap(path, table.file_type, "r+", shape=(table.num_rows, table.embedding_dim))
    columns = slice(shard.first_column, shard.first_column + shard.tensor.shape[1])
    for first_row, vectors in _pieces(table, shard):
        begin = shard.first_row + first_row
        mapped[begin : begin + len(vectors), columns] = vectors


def _pieces(table: Table, shard: Shard) -> Iterator[tuple[int, NDArray[Any]]]:
    for rows in chunks(shard.tensor.shape[0], table.row_bytes):
        yield rows.start, as_vectors(shard.tensor[rows], table)


def chunks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """All rows, some megabytes at a time."""
    step = max(1, _CHUNK_BYTES // row_bytes)
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


def as_vectors(rows: Tensor, table: Table) -> NDArray[Any]:
    """Rows [n, embedding_dim] as the file holds them, of its type."""
    return rows.detach().to("cpu", getattr(torch, table.file_type)).contiguous().numpy()
