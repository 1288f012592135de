"""Applies the messages of an update stream to a session's rows: decodes them, and writes the rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from inference_session.errors import UnavailableError
from inference_session.model_spec import TableSpec
from inference_session.platform.pacing import Rests
from inference_session.rows.base import RowWriter
from inference_session.tables.ordered_updates import OrderedUpdates, SourceProgress
from inference_session.update_stream.encodings import KeyValue, Refusal, Updates, decode
from inference_session.update_stream.message_batch import MessageBatch
from inference_session.update_stream.positions import AppliedPosition, Partition
from inference_session.update_stream.saved_positions import SavedPositions
from inference_session.update_stream.store_retries import StoreRetries
from inference_session.update_stream.stream_stats import StreamStats
from inference_session.update_stream.topics import TableTopics

_ROWS_AT_ONCE = 1024
FOLLOW_TIMEOUT_S = 5.0
"""How long the store's one writer may take to write what this process has read before an error is logged."""
_POLL_S = 0.05
_ALL = slice(None)


class UpdateApplier:
    """Writes the rows of one model that its update stream changes. Used by the stream's thread alone."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        topics: TableTopics,
        rows: RowWriter,
        *,
        saved: SavedPositions,
        retries: StoreRetries,
        stats: StreamStats,
        rests: Rests,
        allow_non_finite: bool,
        closing: threading.Event,
    ) -> None:
        """See KafkaUpdateStream. `saved`: what another process, the store's one writer, has applied."""
        self._tables, self._topics, self._rows = {spec.folder: spec for spec in tables}, topics, rows
        self._saved, self._retries, self._stats, self._rests = saved, retries, stats, rests
        self._allow_non_finite, self._closing = allow_non_finite, closing

    def apply(self, topic: str, topic_id: str, messages: MessageBatch, begins: Mapping[int, int]) -> bool:
        """Write the rows in messages of a topic, once the stores take them; set aside messages that are not rows.

        `begins`: up to where each partition was applied before. Returns False if the stores have lost rows that were
        applied earlier: the messages' partitions must be read again from their oldest messages.

        Raises:
            UnavailableError, StoreError: the stores have not taken them until the stream was closed.
        """
        table = self._topics.table_of(topic)
        if table is None:
            text = f"the model has no table of that name; its tables: {', '.join(map(repr, self._tables)) or 'none'}"
            self._refuse(topic, messages, [Refusal(i, "unknown_table", text) for i in range(len(messages.contents))])
            return True
        if topic_id and self._rows.orders_updates:
            return self._apply_in_order(table, topic, topic_id, messages, begins)
        updates = self._decode(table, topic, messages)
        reached = {
            (topic, partition): AppliedPosition(m.offset + 1, topic_id, m) for partition, m in messages.reached.items()
        }
        self._retries.call(lambda: self._write(table, updates, reached))
        self._count(updates)
        return True

    def _apply_in_order(
        self, table: str, topic: str, topic_id: str, messages: MessageBatch, begins: Mapping[int, int]
    ) -> bool:
        """`apply` where the stores say which updates their rows contain, so that other servers may write them too."""
        applied = {**begins}
        for part in _by_rows(messages.contents, 8 + 4 * self._tables[table].embedding_dim):
            updates, ends = self._decode(table, topic, messages, part), messages.ends(part)
            progress = {
                partition: SourceProgress(
                    f"{topic}/{partition}", topic_id, messages.epochs[partition], applied[partition], end
                )
                for partition, end in ends.items()
            }
            ordered = _ordered(updates, messages.partitions[part], progress)
            if not self._retries.call(partial(self._rows.apply, table, ordered)):
                return False
            self._saved.note_write(table)
            self._count(updates)
            applied |= ends
        return True

    def _decode(self, table: str, topic: str, messages: MessageBatch, part: slice = _ALL) -> Updates:
        """The rows in some messages of a table."""
        spec = self._tables[table]
        updates = decode(
            messages.contents[part],
            spec.embedding_dim,
            allow_non_finite=self._allow_non_finite,
            min_key=0 if spec.keys == "row_number" else None,
        )
        first = part.start or 0
        self._refuse(topic, messages, (one._replace(position=first + one.position) for one in updates.refusals))
        self._rests.rest()
        return updates

    def _count(self, updates: Updates) -> None:
        self._stats.count(updated_rows=len(updates.keys), deleted_rows=len(updates.deleted))

    def _write(self, table: str, updates: Updates, reached: Mapping[Partition, AppliedPosition]) -> None:
        """Write rows; partitions are then applied up to `reached`."""
        try:
            for part in _parts(len(updates.keys)):
                self._rows.update(table, updates.keys[part], updates.vectors[part])
                self._rests.rest()
            for part in _parts(len(updates.deleted)):
                self._rows.erase(table, updates.deleted[part])
                self._rests.rest()
        except UnavailableError:
            if not (self._rows.is_durable and self._await_writer(table, reached)):
                raise
            self._rows.forget(table, np.concatenate([updates.keys, updates.deleted]))
        else:
            self._saved.note_write(table)

    def _await_writer(self, table: str, reached: Mapping[Partition, AppliedPosition]) -> bool:
        """Whether the other process, the store's writer, has saved as much within some seconds."""
        deadline = time.monotonic() + FOLLOW_TIMEOUT_S
        while time.monotonic() < deadline and not self._closing.wait(_POLL_S):
            if self._saved.include(table, reached):
                return True
        return False

    def _refuse(self, topic: str, messages: MessageBatch, refusals: Iterable[Refusal]) -> None:
        """Set messages aside."""
        for refusal in refusals:
            at = refusal.position
            where = f"{topic!r}, partition {messages.partitions[at]}, offset {messages.offsets[at]}"
            self._stats.refuse(refusal.reason, f"{where}: {refusal.text}")


def _ordered(updates: Updates, partitions: Sequence[int], progress: Mapping[int, SourceProgress]) -> OrderedUpdates:
    """Updates with the progress of their partitions, in their order; `partitions`: of each message."""
    source_of = np.searchsorted(list(progress), partitions)
    return OrderedUpdates(
        updates.keys,
        updates.vectors,
        updates.deleted,
        source_of[updates.origins],
        source_of[updates.deleted_origins],
        list(progress.values()),
    )


def _parts(num_rows: int) -> Iterator[slice]:
    """Slices that divide this many rows into pieces."""
    return (slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE))


def _by_rows(messages: Sequence[KeyValue], row_bytes: int) -> Iterator[slice]:
    """Slices that divide messages into pieces of about as many rows, but no message in two."""
    begin = num_rows = 0
    for end, (_, value) in enumerate(messages, 1):
        num_rows += max(len(value or b"") // row_bytes, 1)
        if num_rows >= _ROWS_AT_ONCE or end == len(messages):
            yield slice(begin, end)
            begin, num_rows = end, 0
