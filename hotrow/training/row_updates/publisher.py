"""`UpdatePublisher`: sends the rows that training changes to the servers while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotrow.training.checks import whole
from hotrow.training.onnx_export.cutting import find_cuts
from hotrow.training.onnx_export.dense_network import unwrapped
from hotrow.training.ranks import Ranks
from hotrow.training.row_updates.outbox import Changes, Outbox, OutboxStats
from hotrow.training.row_updates.published import published_keys
from hotrow.training.row_updates.touched_rows import TouchedRows, Watch
from hotrow.training.state import RestoredState, note_publisher, take_restored
from hotrow.training.tables import Shard, Table
from inference_session.errors import ConfigurationError, SessionClosedError
from inference_session.model_spec import folder_names
from inference_session.platform.staging import MAX_VERSION
from inference_session.update_stream.publisher import DEFAULT_TIMEOUT_S, Encoding, Publisher

_CLOCKS_DIFFER = timedelta(minutes=1)
"""The largest difference between the clocks of the ranks and of the process that saved a checkpoint."""
_NO_KEYS = np.empty(0, np.int64)


class UpdatePublisher:
    """Publishes the rows that a model in training has touched, from a separate thread.

        updates = UpdatePublisher(model, "kafka://broker:9092", "ctr", every_steps=50)
        for batch in loader:
            ...
            optimizer.step()
            updates.step()
        updates.close()

    Rows are read in `step`, once every `every_steps` steps. Of rows that wait for the brokers, only
    the last of each key is sent. Ids that a module with managed collisions evicts become deletions; raw ids are
    published, not row numbers. On several ranks, each publishes the rows that it holds;
    rank 0 publishes replicated tables and tables split by columns, so all ranks must call `step`
    the same number of times.

    Rows that an optimizer moves without a batch reading them (momentum of a dense optimizer, weight decay) are not
    published: they follow with the next export.
    """

    def __init__(
        self,
        model: nn.Module,
        url: str,
        name: str,
        *,
        every_steps: int = 1,
        encoding: Encoding = "row",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Connect to the brokers, and begin to note which rows are touched.

        Args:
            model: the model in training, with its wrappers for distribution.
            url: kafka://HOST:PORT[,HOST:PORT].
            name: the name of the served model.
            every_steps: how often rows are read and queued.
            encoding: of messages, as for `Publisher`.
            timeout_s: the longest that the brokers may take to confirm a message.

        Raises:
            ConfigurationError: an argument is not allowed.
            UnsupportedModelError: the model has no tables, or one in a module that is not supported.
            UnavailableError: no broker answers.
        """
        whole("every_steps", every_steps)
        if not isinstance(url, str) or not isinstance(name, str):
            raise ConfigurationError(f"url {url!r} and name {name!r} must both be text")
        self._model, self._every_steps, self._url, self._name = model, every_steps, url, name
        self._ranks = Ranks()
        cuts = find_cuts(unwrapped(model))
        self._outbox = Outbox(lambda: Publisher(url, name, encoding=encoding, timeout_s=timeout_s))
        self._watch: Watch | None = None
        try:
            self._watch = Watch(cuts)
            self._tables = self._followed(self._watch)
        except BaseException:
            self._end()
            raise
        self._num_steps = 0
        self._is_closed = False
        note_publisher(model, self)

    @property
    def stats(self) -> OutboxStats:
        """Counts of rows, such as those that the brokers have confirmed."""
        return self._outbox.stats

    def step(self) -> None:
        """Call after each step of the optimizer.

        Raises:
            UnavailableError: the brokers have stopped answering.
            StoreError: the brokers refuse rows.
            Rows that are not confirmed are kept, and sent when a later call queues more.
        """
        self._check_open()
        self._num_steps += 1
        if self._num_steps % self._every_steps == 0:
            self._queue_touched()
        self._outbox.raise_error()

    def unconfirmed(self) -> dict[str, NDArray[np.int64]]:
        """Keys of touched rows that the brokers have not confirmed yet, by the folder of their table.

        Of tables that rank 0 publishes for others, each rank returns the keys that it touched itself.
        """
        keys = self._outbox.unconfirmed()
        for table in self._tables:
            keys[table.folder] = np.union1d(keys.get(table.folder, _NO_KEYS), table.touched_keys())
        return keys

    def announce(self, version: int) -> None:
        """Tell servers that `hotrow follow` to serve this version; all ranks call it.

        Returns when all rows that were queued on any rank, and then the announcement, are confirmed.

        Raises:
            ConfigurationError: the version is not a whole number above 0.
            UnavailableError, StoreError: as of `step`.
        """
        self._check_open()
        if not isinstance(version, int) or not 0 < version <= MAX_VERSION:  # it would be queued, and never be sent
            raise ConfigurationError(f"version {version!r} is not allowed; versions are whole numbers from 1")
        self._ranks.together(self._outbox.drain)
        self._ranks.first(lambda: self._outbox.announce(version))

    def close(self) -> None:
        """Publish all rows touched so far; returns when all is confirmed. May be called more than once.

        Raises:
            UnavailableError, StoreError: rows were not confirmed; `close` may be called again to send them.
        """
        if self._is_closed:
            return
        self._queue_touched()
        self._outbox.drain()
        self._is_closed = True
        self._end()

    def __enter__(self) -> UpdatePublisher:
        return self

    def __exit__(self, kind: Any, _error: Any, _traceback: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._is_closed = True
            self._end()

    def __repr__(self) -> str:
        return f"<UpdatePublisher of model {self._name!r} to {self._url!r}, every {self._every_steps} steps>"

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError("the publisher has been closed")

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._outbox.close()

    def _followed(self, watch: Watch) -> list[_FollowedTable | _FollowedKeys]:
        folders = folder_names([rows.table.name for rows in watch.touched])
        kinds = self._ranks.gather([_kind(rows.table, alone=self._ranks.size == 1) for rows in watch.touched])
        return [
            _FollowedKeys(rows, folder)
            if rows.table.hash_table is not None
            else _FollowedTable(rows, folder, _strictest([of_rank[number] for of_rank in kinds]), self._ranks)
            for number, (rows, folder) in enumerate(zip(watch.touched, folders, strict=True))
        ]

    def _queue_touched(self) -> None:
        restored = take_restored(self._model)
        for table in self._tables:
            if restored is not None:
                table.touch_again(self._keys_since(restored, table))
        # All ranks complete the collective calls before one of them may fail.
        for changes in [table.changes() for table in self._tables]:
            if len(changes.keys) or len(changes.deleted):
                self._outbox.put(changes)

    def _keys_since(self, restored: RestoredState, table: _FollowedTable | _FollowedKeys) -> NDArray[np.int64]:
        """Keys whose rows on the servers may differ from those of the restored model."""
        earlier = restored.moment - _CLOCKS_DIFFER
        published = published_keys(self._url, self._name, table.folder, table.embedding_dim, earlier)
        return np.union1d(published, restored.unconfirmed.get(table.folder, _NO_KEYS))


def _kind(table: Table, *, alone: bool) -> str:
    """Which ranks have whole rows: each has its own ("rows"), all have all ("copies"), or none has any ("columns")."""
    if alone:
        return "rows"
    if table.is_replicated():
        return "copies"
    return "rows" if all(shard.tensor.shape[1] == table.embedding_dim for shard in table.shards()) else "columns"


def _strictest(kinds: Sequence[str]) -> str:
    return max(kinds, key=["rows", "copies", "columns"].index)


class _Piece(NamedTuple):
    """Part of some rows."""

    rows: NDArray[np.int64]
    first_column: int
    vectors: NDArray[np.float32]


class _FollowedKeys:
    """A hash embedding: turns touched keys into rows to publish, each on the rank that holds the row."""

    def __init__(self, touched: TouchedRows, folder: str) -> None:
        self.folder = folder
        self._touched, self._rows = touched, touched.table.hash_table
        self.embedding_dim = touched.table.embedding_dim

    def changes(self) -> Changes:
        """The changes since the last call."""
        keys = torch.cat([self._touched.take(), self._touched.gone.take()]).unique()
        held, vectors = self._rows.vectors_of(keys)
        return Changes(self.folder, _numpy(keys[held]), vectors.cpu().numpy(), _numpy(keys[~held]))

    def touched_keys(self) -> NDArray[np.int64]:
        """Keys that `changes` would give, without taking them."""
        return np.union1d(_numpy(self._touched.seen()), _numpy(self._touched.gone.seen()))

    def touch_again(self, keys: NDArray[np.int64]) -> None:
        """Publish the current rows of these keys, and deletions of those that have no row any more."""
        tensor = torch.from_numpy(keys)
        self._touched.note(tensor[self._rows.owns(tensor)].to(self._touched.table.device))


def _numpy(keys: Tensor) -> NDArray[np.int64]:
    return keys.cpu().numpy()


class _FollowedTable:
    """One table: turns touched rows into rows to publish, on this rank."""

    def __init__(self, touched: TouchedRows, folder: str, kind: str, ranks: Ranks) -> None:
        self.folder = folder
        self._touched, self._table, self._kind, self._ranks = touched, touched.table, kind, ranks
        self.embedding_dim = self._table.embedding_dim
        self._published = _NO_KEYS
        """Raw ids that had a row at the last publication, ascending; of a table with managed collisions."""
        if self._table.has_keys:
            self._published = self._ids()[0].cpu().numpy().copy()

    def changes(self) -> Changes:
        """The changes since the last call; none on ranks that publish nothing of this table."""
        rows = self._touched.take()
        if self._table.has_keys:
            return self._of_ids(rows)
        if self._kind == "rows":
            numbers, vectors = self._read(rows)
        elif self._kind == "copies":
            numbers, vectors = self._read_copies(rows)
        else:
            numbers, vectors = self._put_together(rows)
        return Changes(self.folder, numbers, vectors, _NO_KEYS)

    def touched_keys(self) -> NDArray[np.int64]:
        """Keys of the rows that `changes` would give, without taking them."""
        rows = self._touched.seen()
        if not self._table.has_keys:
            return rows.cpu().numpy()
        ids, known_rows = self._ids()
        touched = ids[torch.isin(known_rows, rows)].cpu().numpy()
        return np.union1d(touched, np.setxor1d(ids.cpu().numpy(), self._published))

    def touch_again(self, keys: NDArray[np.int64]) -> None:
        """Publish the current rows of these keys: the servers may have rows of lost training steps."""
        if self._table.has_keys:
            self._published = np.union1d(self._published, keys)
            ids, rows = self._ids()
            self._touched.note(rows[torch.isin(ids, torch.from_numpy(keys).to(ids.device))])
        else:
            rows = torch.from_numpy(keys[(keys >= 0) & (keys < self._table.num_rows)]).to(self._table.device)
            self._touched.note(rows if self._kind != "rows" else self._own(rows))

    def _own(self, rows: Tensor) -> Tensor:
        kept = [rows[_inside(rows, shard)] for shard in self._table.shards()]
        return torch.cat(kept) if kept else rows[:0]

    def _read(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Whole rows that this rank holds."""
        numbers, vectors = [], []
        shards = self._table.shards()
        for shard in shards:
            inside = rows if len(shards) == 1 else rows[_inside(rows, shard)]
            numbers.append(inside.cpu().numpy())
            vectors.append(_vectors(shard, inside))
        if not numbers:
            return _NO_KEYS, np.empty((0, self._table.embedding_dim), np.float32)
        return np.concatenate(numbers), np.concatenate(vectors)

    def _read_copies(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows that any rank has touched, on rank 0: each rank has all of them."""
        everywhere = np.unique(np.concatenate(self._ranks.gather(rows.cpu().numpy())))
        if not self._ranks.is_first:
            everywhere = everywhere[:0]
        return self._read(torch.from_numpy(everywhere).to(self._table.device))

    def _put_together(self, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows whose columns are on several ranks, on rank 0."""
        found = [(shard, rows[_inside(rows, shard)]) for shard in self._table.shards()]
        own = [_Piece(r.cpu().numpy(), shard.first_column, _vectors(shard, r)) for shard, r in found]
        pieces = [piece for of_rank in self._ranks.gather(own) for piece in of_rank]
        if not self._ranks.is_first or not pieces:
            return _NO_KEYS, np.empty((0, self._table.embedding_dim), np.float32)
        numbers = np.unique(np.concatenate([piece.rows for piece in pieces]))
        vectors = np.zeros((len(numbers), self._table.embedding_dim), np.float32)
        for piece in pieces:
            end = piece.first_column + piece.vectors.shape[1]
            vectors[np.searchsorted(numbers, piece.rows), piece.first_column : end] = piece.vectors
        return numbers, vectors

    def _of_ids(self, rows: Tensor) -> Changes:
        """Rows under the ids that own them now; ids that no longer own a row are deleted."""
        ids, known_rows = self._ids()
        now = ids.cpu().numpy().copy()  # the module changes its ids in place
        is_new = torch.from_numpy(~np.isin(now, self._published)).to(ids.device)
        chosen = torch.isin(known_rows, rows) | is_new
        vectors = self._read_in_order(known_rows[chosen])
        gone = np.setdiff1d(self._published, now)
        self._published = now
        return Changes(self.folder, ids[chosen].cpu().numpy(), vectors, gone)

    def _ids(self) -> tuple[Tensor, Tensor]:
        """Raw ids and their rows, of a table with managed collisions; without the last one, the module's filler."""
        known = self._table.known_keys()
        return known.keys[:-1], known.rows[:-1]

    def _read_in_order(self, rows: Tensor) -> NDArray[np.float32]:
        vectors = np.zeros((len(rows), self._table.embedding_dim), np.float32)
        for shard in self._table.shards():
            inside = _inside(rows, shard)
            vectors[inside.cpu().numpy()] = _vectors(shard, rows[inside])
        return vectors


def _inside(rows: Tensor, shard: Shard) -> Tensor:
    return (rows >= shard.first_row) & (rows < shard.first_row + shard.tensor.shape[0])


def _vectors(shard: Shard, rows: Tensor) -> NDArray[np.float32]:
    """Part of rows, by their numbers in the whole table."""
    local = rows - shard.first_row if shard.first_row else rows
    return shard.tensor.index_select(0, local).to("cpu", torch.float32).numpy()
