"""Rows on their way to the brokers: the training thread queues them, a separate thread publishes them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, UnavailableError, fresh, without_frames
from inference_session.update_stream.publisher import Publisher

_MAX_PENDING_BYTES = 256 << 20
"""The most rows that wait for the brokers; a thread that queues more waits as well."""


class Changes(NamedTuple):
    """Rows of one table, each key once."""

    table: str
    """Its folder."""
    keys: NDArray[np.int64]
    """[n]"""
    vectors: NDArray[np.float32]
    """[n, embedding_dim]"""
    deleted: NDArray[np.int64] = np.empty(0, np.int64)
    """[m], none of them among `keys`."""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.keys.nbytes + self.vectors.nbytes + self.deleted.nbytes


@dataclass
class OutboxStats:
    """The counts of an outbox so far."""

    num_rows: int = 0
    """Confirmed by the brokers."""
    num_deleted: int = 0
    num_replaced: int = 0
    """Not sent because a newer row of the key replaced them."""


class Outbox:
    """Publishes what is queued, each key's last row, in order; closed by `close`.

    Rows that the brokers have not confirmed are kept, and sent again after the error has been raised.
    """

    def __init__(self, connect: Callable[[], Publisher]) -> None:
        """Connect to the brokers; raises the errors of Publisher."""
        self.stats = OutboxStats()
        self._connect = connect
        self._publisher: Publisher | None = connect()
        self._changed = threading.Condition()
        self._pending: dict[str, Changes] = {}
        self._sending: dict[str, Changes] = {}
        self._announced: list[int] = []
        self._busy = self._closing = False
        self._error: HotrowError | None = None
        self._thread = threading.Thread(target=self._work, name="hotrow-updates", daemon=True)
        self._thread.start()

    def put(self, changes: Changes) -> None:
        """Queue rows; waits while too many are queued, unless publishing has failed."""
        with self._changed:
            self._merge(changes)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_bytes() <= _MAX_PENDING_BYTES or self._error is not None)

    def drain(self) -> None:
        """Return when the brokers have confirmed all queued rows; raises errors of publishing."""
        with self._changed:
            self.raise_error()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._pending or self._announced or self._busy) or self._error)
            self.raise_error()

    def announce(self, version: int) -> None:
        """Publish all queued rows, then the announcement of a version; returns when both are confirmed."""
        with self._changed:
            self.raise_error()
            self._announced.append(version)
        self.drain()

    def raise_error(self) -> None:
        """Raise the error since the last call, if any; queued rows are sent again."""
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                self._changed.notify_all()
                raise fresh(error)

    def unconfirmed(self) -> dict[str, NDArray[np.int64]]:
        """Keys, int64 [n], that the brokers have not confirmed, by table; there may be duplicates."""
        parts: defaultdict[str, list[NDArray[np.int64]]] = defaultdict(list)
        with self._changed:
            for changes in (*self._pending.values(), *self._sending.values()):
                parts[changes.table] += [changes.keys, changes.deleted]
        return {table: np.concatenate(keys) for table, keys in parts.items()}

    def close(self) -> None:
        """End the thread, without waiting for queued rows."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _num_bytes(self) -> int:
        return sum(changes.num_bytes for changes in self._pending.values())

    def _merge(self, changes: Changes) -> None:
        older = self._pending.get(changes.table)
        if older is None:
            self._pending[changes.table] = changes
            return
        merged = merge(older, changes)
        self._pending[changes.table] = merged
        self.stats.num_replaced += len(older.keys) + len(changes.keys) - len(merged.keys)

    # The thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (self._has_work() and self._error is None))
                if self._closing:
                    return
                taken, announced = self._pending, self._announced
                self._pending, self._sending, self._announced, self._busy = {}, taken, [], True
                self._changed.notify_all()
            error = self._try(taken, announced)
            with self._changed:
                self._busy, self._sending = False, {}
                if error is not None:
                    self._put_back(taken, announced, error)
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._pending or self._announced)

    def _try(self, taken: dict[str, Changes], announced: list[int]) -> HotrowError | None:
        try:
            self._send(taken, announced)
        except HotrowError as error:
            self._publisher = None
            return without_frames(error)
        except Exception as error:  # noqa: BLE001  a thread that ends would lose rows silently
            self._publisher = None
            return StoreError(f"updates cannot be published: {error!r}")
        return None

    def _send(self, taken: dict[str, Changes], announced: list[int]) -> None:
        if self._publisher is None:
            self._publisher = self._connect()
        for changes in taken.values():
            if len(changes.deleted):
                self._publisher.delete(changes.table, changes.deleted)
            if len(changes.keys):
                self._publisher.publish(changes.table, changes.keys, changes.vectors)
        self._publisher.flush()
        for changes in taken.values():
            self.stats.num_rows += len(changes.keys)
            self.stats.num_deleted += len(changes.deleted)
        for version in announced:  # after the rows are confirmed
            self._publisher.announce(version)
            self._publisher.flush()

    def _put_back(self, taken: dict[str, Changes], announced: list[int], error: HotrowError) -> None:
        newer, self._pending = self._pending, taken
        for changes in newer.values():
            self._merge(changes)
        self._announced = [*announced, *self._announced]
        kind = type(error) if isinstance(error, (UnavailableError, StoreError)) else StoreError
        self._error = kind(f"{error}; unconfirmed rows are kept and sent together with the next ones")


def merge(older: Changes, newer: Changes) -> Changes:
    """Merge both; of a key in both, the newer row stays."""
    said = np.concatenate([newer.keys, newer.deleted])
    kept = ~np.isin(older.keys, said)
    keys = np.concatenate([older.keys[kept], newer.keys])
    vectors = np.concatenate([older.vectors[kept], newer.vectors])
    gone = older.deleted[~np.isin(older.deleted, said)]
    return Changes(newer.table, keys, vectors, np.concatenate([gone, newer.deleted]))
