"""`UpdatePublisher`: sends the rows that training changes to the servers while it trains."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hotrow.training.checks import whole
from hotrow.training.model_notes import PUBLISHERS, RESTORED, RestoredState
from hotrow.training.onnx_export.cutting import find_cuts
from hotrow.training.onnx_export.dense_network import unwrapped
from hotrow.training.ranks import Ranks
from hotrow.training.row_updates.followed_tables import KINDS, FollowedTable, kind_of
from hotrow.training.row_updates.outbox import Outbox, OutboxStats
from hotrow.training.row_updates.published_keys import published_keys
from hotrow.training.row_updates.touched_rows import Watch
from inference_session.errors import ConfigurationError, SessionClosedError, UnavailableError, fresh, without_frames
from inference_session.model_spec import folder_names
from inference_session.platform.drafts import MAX_VERSION
from inference_session.update_stream.publisher import DEFAULT_TIMEOUT_S, Encoding, Publisher
from inference_session.urls.kafka_url import KafkaUrl

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
            # The types: a URL may contain a password.
            raise ConfigurationError(
                f"url and name must both be text; found {type(url).__name__} and {type(name).__name__}"
            )
        self._model = unwrapped(model)
        self._every_steps, self._url, self._name = every_steps, url, name
        self._brokers = str(KafkaUrl.parse(url))
        """The URL without its password."""
        self._ranks = Ranks()
        cuts = find_cuts(self._model)
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
        PUBLISHERS[self._model] = self

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
        """Keys [n] of touched rows that the brokers have not confirmed yet, by the folder of their table.

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
        return f"<UpdatePublisher of model {self._name!r} to {self._brokers!r}, every {self._every_steps} steps>"

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError("the publisher has been closed")

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._outbox.close()

    def _followed(self, watch: Watch) -> list[FollowedTable]:
        folders = folder_names([rows.table.name for rows in watch.touched])
        kinds = self._ranks.gather([kind_of(rows, alone=self._ranks.size == 1) for rows in watch.touched])
        return [
            KINDS[max(of_ranks)](rows, folder, self._ranks)
            for rows, folder, of_ranks in zip(watch.touched, folders, zip(*kinds, strict=True), strict=True)
        ]

    def _queue_touched(self) -> None:
        # All ranks complete the collective calls before one of them may fail.
        failure = self._touch_restored()
        for changes in [table.changes() for table in self._tables]:
            if len(changes.keys) or len(changes.deleted):
                self._outbox.put(changes)
        if failure is not None:
            raise fresh(failure)

    def _touch_restored(self) -> UnavailableError | None:
        """Have the rows published again that the servers have from steps before a restored one. Where the brokers
        cannot say which these are, that error is returned, and the next call asks again.
        """
        if (restored := RESTORED.get(self._model)) is None:
            return None
        unconfirmed = self._outbox.unconfirmed()  # before the brokers are asked, who may have them meanwhile
        try:
            found = [self._keys_since(restored, table) for table in self._tables]
        except UnavailableError as error:
            return without_frames(error)
        for table, keys in zip(self._tables, found, strict=True):
            table.touch_again(np.union1d(keys, unconfirmed.get(table.folder, _NO_KEYS)))
        del RESTORED[self._model]
        return None

    def _keys_since(self, restored: RestoredState, table: FollowedTable) -> NDArray[np.int64]:
        """Keys whose rows on the servers may differ from those of the restored model."""
        earlier = restored.moment - _CLOCKS_DIFFER
        published = published_keys(self._url, self._name, table.folder, table.embedding_dim, earlier)
        return np.union1d(published, restored.unconfirmed.get(table.folder, _NO_KEYS))
