"""Tables that training changes: each turns the rows that were touched into rows to publish, on this rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.training.ranks import Ranks
from hotrow.training.row_updates.outbox import Changes
from hotrow.training.row_updates.touched_rows import TouchedRows
from hotrow.training.tables import Shard


class _Piece(NamedTuple):
    """Part of some rows."""

    rows: NDArray[np.int64]
    first_column: int
    vectors: NDArray[np.float32]


class FollowedTable(ABC):
    """One table: turns what training touches of it into rows to publish, on this rank."""

    def __init__(self, touched: TouchedRows, folder: str, ranks: Ranks) -> None:
        self.folder = folder
        self._touched, self._table, self._ranks = touched, touched.table, ranks
        self.embedding_dim = self._table.embedding_dim

    @abstractmethod
    def changes(self) -> Changes:
        """The changes since the last call; none on ranks that publish nothing of this table."""

    @abstractmethod
    def touched_keys(self) -> NDArray[np.int64]:
        """Keys, int64 [n], that `changes` would give, without taking them."""

    @abstractmethod
    def touch_again(self, keys: NDArray[np.int64]) -> None:
        """Publish the current rows of these keys, int64 [n]: the servers may have rows of lost training steps."""


class _FollowedRows(FollowedTable):
    """A table of which each rank has its own rows, and publishes them."""

    def changes(self) -> Changes:
        return Changes(self.folder, *self._read(self._touched.take()))

    def touched_keys(self) -> NDArray[np.int64]:
        return _numpy(self._touched.seen())

    def touch_again(self, keys: NDArray[np.int64]) -> None:
        rows = torch.from_numpy(keys[(keys >= 0) & (keys < self._table.num_rows)]).to(self._table.device)
        self._touched.note(self._own(rows))

    def _own(self, rows: Tensor) -> Tensor:
        """Those of some rows that this rank takes note of."""
        kept = [rows[_inside(rows, shard)] for shard in self._table.shards()]
        return torch.cat(kept) if kept else rows[:0]

    def _read(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The touched rows that this rank publishes."""
        numbers, vectors = [], []
        shards = self._table.shards()
        for shard in shards:
            inside = rows if len(shards) == 1 else rows[_inside(rows, shard)]
            numbers.append(_numpy(inside))
            vectors.append(_vectors(shard, inside))
        if not numbers:
            return _nothing(self.embedding_dim)
        return np.concatenate(numbers), np.concatenate(vectors)


class _FollowedShards(_FollowedRows):
    """A table that a plain module looks up, divided over the ranks by FSDP: a rank may read rows that another holds."""

    def _read(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return super()._read(self._own(_of_all_ranks(rows, self._ranks).to(self._table.device)))


class _FollowedCopies(_FollowedRows):
    """A table of which all ranks have all rows: rank 0 publishes those that any rank has touched."""

    def _own(self, rows: Tensor) -> Tensor:
        return rows

    def _read(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        everywhere = _of_all_ranks(rows, self._ranks)
        if not self._ranks.is_first:
            everywhere = everywhere[:0]
        return super()._read(everywhere.to(self._table.device))


class _FollowedColumns(_FollowedCopies):
    """A table whose rows have their columns on several ranks: rank 0 puts them together and publishes them."""

    def _read(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        found = [(shard, rows[_inside(rows, shard)]) for shard in self._table.shards()]
        own = [_Piece(_numpy(r), shard.first_column, _vectors(shard, r)) for shard, r in found]
        pieces = [piece for of_rank in self._ranks.gather(own) for piece in of_rank]
        if not self._ranks.is_first or not pieces:
            return _nothing(self.embedding_dim)
        numbers = np.unique(np.concatenate([piece.rows for piece in pieces]))
        vectors = np.zeros((len(numbers), self.embedding_dim), np.float32)
        for piece in pieces:
            end = piece.first_column + piece.vectors.shape[1]
            vectors[np.searchsorted(numbers, piece.rows), piece.first_column : end] = piece.vectors
        return numbers, vectors


class _FollowedIds(FollowedTable):
    """A table with managed collisions: publishes rows under the ids that own them now."""

    def __init__(self, touched: TouchedRows, folder: str, ranks: Ranks) -> None:
        super().__init__(touched, folder, ranks)
        self._published = _numpy(self._ids()[0]).copy()
        """Raw ids that had a row at the last publication, ascending."""

    def changes(self) -> Changes:
        """See FollowedTable; ids that no longer own a row are deleted."""
        rows = self._touched.take()
        ids, known_rows = self._ids()
        now = _numpy(ids).copy()  # the module changes its ids in place
        is_new = torch.from_numpy(~np.isin(now, self._published)).to(ids.device)
        chosen = torch.isin(known_rows, rows) | is_new
        vectors = self._read_in_order(known_rows[chosen])
        gone = np.setdiff1d(self._published, now)
        self._published = now
        return Changes(self.folder, _numpy(ids[chosen]), vectors, gone)

    def touched_keys(self) -> NDArray[np.int64]:
        ids, known_rows = self._ids()
        touched = _numpy(ids[torch.isin(known_rows, self._touched.seen())])
        return np.union1d(touched, np.setxor1d(_numpy(ids), self._published))

    def touch_again(self, keys: NDArray[np.int64]) -> None:
        self._published = np.union1d(self._published, keys)
        ids, rows = self._ids()
        self._touched.note(rows[torch.isin(ids, torch.from_numpy(keys).to(ids.device))])

    def _ids(self) -> tuple[Tensor, Tensor]:
        """Raw ids and their rows, without the last one, the module's filler."""
        known = self._table.known_keys()
        return known.keys[:-1], known.rows[:-1]

    def _read_in_order(self, rows: Tensor) -> NDArray[np.float32]:
        vectors = np.zeros((len(rows), self.embedding_dim), np.float32)
        for shard in self._table.shards():
            inside = _inside(rows, shard)
            vectors[_numpy(inside)] = _vectors(shard, rows[inside])
        return vectors


class _FollowedKeys(FollowedTable):
    """A hash embedding: each rank publishes the rows that it holds."""

    def changes(self) -> Changes:
        """See FollowedTable; keys that have lost their rows are deleted."""
        keys = torch.cat([self._touched.take(), self._touched.gone.take()]).unique()
        held, vectors = self._table.hash_table.vectors_of(keys)
        return Changes(self.folder, _numpy(keys[held]), vectors.cpu().numpy(), _numpy(keys[~held]))

    def touched_keys(self) -> NDArray[np.int64]:
        return np.union1d(_numpy(self._touched.seen()), _numpy(self._touched.gone.seen()))

    def touch_again(self, keys: NDArray[np.int64]) -> None:
        tensor = torch.from_numpy(keys)
        self._touched.note(tensor[self._table.hash_table.owns(tensor)].to(self._table.device))


KINDS = (_FollowedRows, _FollowedShards, _FollowedCopies, _FollowedColumns, _FollowedIds, _FollowedKeys)
"""How a table is followed; of several ranks, as the last of these kinds that any of them finds."""


def kind_of(touched: TouchedRows, *, alone: bool) -> int:
    """The number of the kind, as this rank finds it."""
    kind: type[FollowedTable] = _FollowedRows
    table = touched.table
    if table.hash_table is not None:
        kind = _FollowedKeys
    elif table.has_keys:
        kind = _FollowedIds
    elif not alone and table.is_replicated():
        kind = _FollowedCopies
    elif not alone and any(shard.tensor.shape[1] != table.embedding_dim for shard in table.shards()):
        kind = _FollowedColumns
    elif not alone and table.shards() and not touched.are_own:
        kind = _FollowedShards
    return KINDS.index(kind)


def _of_all_ranks(rows: Tensor, ranks: Ranks) -> Tensor:
    """Rows that any rank has touched, each once, on the CPU."""
    return torch.from_numpy(np.unique(np.concatenate(ranks.gather(_numpy(rows)))))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()


def _nothing(embedding_dim: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """No rows: their numbers and vectors."""
    return np.empty(0, np.int64), np.empty((0, embedding_dim), np.float32)


def _inside(rows: Tensor, shard: Shard) -> Tensor:
    return (rows >= shard.first_row) & (rows < shard.first_row + shard.tensor.shape[0])


def _vectors(shard: Shard, rows: Tensor) -> NDArray[np.float32]:
    """Part of rows, by their numbers in the whole table."""
    local = rows - shard.first_row if shard.first_row else rows
    return shard.tensor.index_select(0, local).to("cpu", torch.float32).numpy()
