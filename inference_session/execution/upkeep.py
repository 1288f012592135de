"""The background work of a session that serves: it follows updates, saves hot keys, and records the keys of look-ups.

Each part runs in a thread of its own, where a setting asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inference_session.config import SessionConfig
from inference_session.errors import UnavailableError
from inference_session.rows.base import Rows
from inference_session.rows.hot_keys import HotKeysWriter, read_hot_keys
from inference_session.sizing.key_recorder import KeyRecorder, create_key_recorder
from inference_session.stats import SessionStats
from inference_session.tables.base import HotKeys
from inference_session.version_directory.version import VersionDirectory

if TYPE_CHECKING:
    from inference_session.update_stream.kafka_stream import KafkaUpdateStream
    from inference_session.update_stream.positions import AppliedPartitions
    from inference_session.update_stream.stream_stats import StreamSnapshot


class SessionUpkeep:
    """Does nothing until `begin` and `follow_updates`."""

    def __init__(self, version: VersionDirectory, config: SessionConfig, rows: Rows) -> None:
        """The caller closes `rows` after this object."""
        self._version, self._config, self.rows = version, config, rows
        self.recorder: KeyRecorder | None = None
        """Gets the keys of look-ups; None: nobody asked for them."""
        self._hot_keys: HotKeysWriter | None = None
        self._updates: KafkaUpdateStream | None = None

    def read_hot_keys(self) -> HotKeys:
        """What an earlier session of the model has saved."""
        return read_hot_keys(self._hot_keys_file) if self._config.state_dir else {}

    def begin(self, stats: SessionStats) -> None:
        """Record keys, and save hot keys, from now on; `stats` counts the look-ups that make keys hot."""
        self.recorder = create_key_recorder(self._version, self._config)
        cache = self.rows.stats().cache
        if self._config.state_dir and cache is not None and cache.capacity:
            self._hot_keys = HotKeysWriter(self._hot_keys_file, self.rows.hot_keys, stats.num_looked_up)

    def follow_updates(self) -> None:
        """Apply updates from now on, and those published before that have not been applied.

        Returns once these are applied, or after `catch_up_s`.
        """
        config, version = self._config, self._version
        if config.update_stream is None:
            return
        from inference_session.update_stream.kafka_stream import KafkaUpdateStream

        self._updates = KafkaUpdateStream(
            config.update_stream,
            version.model,
            version.version,
            version.spec.tables,
            self.rows.writer,
            topic_filter=config.update_filter,
            since=config.update_since,
            allow_non_finite=config.non_finite_updates == "apply",
        )
        self._updates.wait_until_current(config.catch_up_s)

    def save_hot_keys(self) -> None:
        """Let the next session of the model, in any process, start with the rows that are hot here now.

        Without a cache over stores, or without `state_dir`, this does nothing. It is also done every few seconds.
        """
        if self._hot_keys is not None:
            self._hot_keys.write()

    @property
    def shares_rows(self) -> bool:
        """Whether other sessions see what the update stream writes, without one session being responsible for it."""
        return self._updates is not None and self._config.has_store and not self.rows.writer.is_durable

    @contextlib.contextmanager
    def updates_held(self) -> Iterator[AppliedPartitions]:
        """Pause the update stream until the context ends; yields how far it is applied."""
        if self._updates is None:
            yield {}
        else:
            with self._updates.held() as applied:
                yield applied

    def catch_up_with(self, applied: AppliedPartitions) -> None:
        """Wait until this session has applied what another session has applied.

        Raises:
            UnavailableError: it has not applied them within `catch_up_s`.
        """
        catch_up_s = self._config.catch_up_s
        if self._updates is not None and not self._updates.wait_until_applied(applied, catch_up_s):
            raise UnavailableError(
                f"the session of {str(self._version.path)!r} has not applied within catch_up_s={catch_up_s:g} the"
                f" updates that are served now ({self._updates.stats().failure or 'a larger catch_up_s allows more'})"
            )

    def update_stats(self) -> StreamSnapshot | None:
        """The statistics of the update stream; None: there is none."""
        return None if self._updates is None else self._updates.stats()

    def close(self) -> None:
        """End the work. May be called twice."""
        if self._updates is not None:
            self._updates.close()
        if self._hot_keys is not None:
            self._hot_keys.close()
            self._hot_keys = None  # the rows are closed next
        if self.recorder is not None:
            self.recorder.close()

    @property
    def _hot_keys_file(self) -> Path:
        return self._version.state_file(self._config.state_dir, "hot_keys")
