"""Applies the messages of an update stream to a session's rows: decodes them, writes the rows, and notes how far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from inference_session.errors import StoreError, UnavailableError
from inference_session.model_spec import TableSpec
from inference_session.platform.pacing import Rests
from inference_session.rows.base import RowWriter
from inference_session.update_stream.encodings import Refusal, Updates, decode
from inference_session.update_stream.message_batch import MessageBatch
from inference_session.update_stream.offset_notes import is_of_a_push, is_push_unfinished, read_applied, with_applied
from inference_session.update_stream.positions import AppliedPosition, Partition
from inference_session.update_stream.stream_stats import StreamStats
from inference_session.update_stream.topics import table_of

_ROWS_AT_ONCE = 1024
FOLLOW_TIMEOUT_S = 5.0
"""How long the store's one writer may take to write what this process has read before an error is logged."""
_POLL_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

Result = TypeVar("Result")


class UpdateApplier:
    """Writes the rows of one model that its update stream changes. Used by the stream's thread alone."""

    def __init__(
        self,
        model: str,
        tables: Sequence[TableSpec],
        rows: RowWriter,
        stats: StreamStats,
        rests: Rests,
        *,
        allow_non_finite: bool,
        closing: threading.Event,
        while_waiting: Callable[[], None],
    ) -> None:
        """See KafkaUpdateStream.

        A write that the stores refuse is tried again until they take it, or until `closing` is set: then their error
        is raised. `while_waiting` is called between the attempts.
        """
        self._model = model
        self._tables = {spec.folder: spec for spec in tables}
        self._rows = rows
        self._stats = stats
        self._rests = rests
        self._allow_non_finite = allow_non_finite
        self._closing = closing
        self._while_waiting = while_waiting
        self._unsaved: set[str] = set()
        """Tables that have been applied further than their notes say."""
        self._noted: set[str] = set()
        """Tables in whose notes this object has stored how far they are applied."""

    def apply(self, topic: str, topic_id: str, messages: MessageBatch) -> None:
        """Write the rows in messages of a topic, once the stores take them; set aside messages that are not rows."""
        table = self.table_of(topic)
        if table is None:
            text = f"the model has no table of that name; its tables: {', '.join(map(repr, self._tables)) or 'none'}"
            self._refuse(topic, messages, [Refusal(i, "unknown_table", text) for i in range(len(messages.contents))])
            return
        spec = self._tables[table]
        updates = decode(
            messages.contents,
            spec.embedding_dim,
            allow_non_finite=self._allow_non_finite,
            min_key=0 if spec.keys == "row_number" else None,
        )
        self._refuse(topic, messages, updates.refusals)
        self._rests.rest()
        reached = {
            (topic, partition): AppliedPosition(m.offset + 1, topic_id, m) for partition, m in messages.reached.items()
        }
        self._persist(lambda: self._write(table, updates, reached))
        self._stats.count(updated_rows=len(updates.keys), deleted_rows=len(updates.deleted))

    def saved(self, topic: str, partition: int) -> AppliedPosition | None:
        """How far a partition's updates have been applied to rows that outlive this process; None: unknown."""
        table = self.table_of(topic)
        if table is None or not self._rows.is_durable:
            return None
        return self._persist(lambda: read_applied(self._rows.note(table), topic)).get(partition)

    def renew_cached(self) -> None:
        """Read cached rows again: they may be older than the updates that notes count as applied, which no message
        repeats.
        """
        self._rows.renew()

    def forget_saved(self, topic: str) -> None:
        """Save again how far a topic is applied: what its table's note says is no longer valid."""
        table = self.table_of(topic)
        if table is not None and self._rows.is_durable:
            self._unsaved.add(table)

    def save(self, applied: Mapping[Partition, AppliedPosition | None]) -> bool:
        """Store next to the rows how far updates have been applied; returns whether there was anything to store.

        Raises:
            UnavailableError, StoreError: a store cannot take a note at present.
        """
        unsaved = sorted(self._unsaved)
        for table in unsaved:
            of_table = {one: how_far for one, how_far in applied.items() if self.table_of(one[0]) == table}
            self._rows.save_note(table, with_applied(self._rows.note(table), of_table))
            self._unsaved.discard(table)
            self._noted.add(table)
        return bool(unsaved)

    def pushed_tables(self) -> set[str]:
        """Tables that were pushed again after their notes were stored, and so lack their updates.

        Raises:
            UnavailableError, StoreError: a store cannot return a note at present.
        """
        notes = {table: self._rows.note(table) for table in self._noted}
        pushed = {table for table, note in notes.items() if is_of_a_push(note) and not is_push_unfinished(note)}
        self._noted -= pushed
        return pushed

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
            if self._rows.is_durable:
                self._unsaved.add(table)

    def _await_writer(self, table: str, reached: Mapping[Partition, AppliedPosition]) -> bool:
        """Whether the other process, the store's writer, has saved as much within some seconds."""
        deadline = time.monotonic() + FOLLOW_TIMEOUT_S
        while time.monotonic() < deadline and not self._closing.wait(_POLL_S):
            note = self._rows.note(table)
            if all(wanted.is_within(read_applied(note, topic).get(p)) for (topic, p), wanted in reached.items()):
                return True
        return False

    def _persist(self, work: Callable[[], Result]) -> Result:
        """Make a call to the stores, repeatedly until it succeeds."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = work()
            except (UnavailableError, StoreError) as error:
                self._stats.fail(str(error))
                self._while_waiting()
                if self._closing.wait(pause_s):
                    raise
            else:
                self._stats.recover()
                return result
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _refuse(self, topic: str, messages: MessageBatch, refusals: Iterable[Refusal]) -> None:
        """Set messages aside."""
        for refusal in refusals:
            at = refusal.position
            where = f"{topic!r}, partition {messages.partitions[at]}, offset {messages.offsets[at]}"
            self._stats.refuse(refusal.reason, f"{where}: {refusal.text}")

    def table_of(self, topic: str) -> str | None:
        """The table whose updates a topic carries; None: the model has no table of that name."""
        table = table_of(topic, self._model)
        return table if table in self._tables else None


def _parts(num_rows: int) -> Iterator[slice]:
    """Slices that divide this many rows into pieces."""
    return (slice(begin, begin + _ROWS_AT_ONCE) for begin in range(0, num_rows, _ROWS_AT_ONCE))
