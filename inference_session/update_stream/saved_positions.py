"""How far updates are applied to rows that outlive this process, saved in the notes of their tables."""

from __future__ import annotations

from collections.abc import Mapping

from inference_session.rows.base import RowWriter
from inference_session.update_stream.offset_notes import is_of_a_push, is_push_unfinished, read_applied, with_applied
from inference_session.update_stream.positions import AppliedPosition, Partition
from inference_session.update_stream.store_retries import StoreRetries
from inference_session.update_stream.topics import TableTopics


class SavedPositions:
    """The notes of a model's tables. Where its rows are not durable, nothing is saved.

    Used by the stream's thread alone.
    """

    def __init__(self, rows: RowWriter, topics: TableTopics, retries: StoreRetries) -> None:
        self._rows = rows
        self._topics = topics
        self._retries = retries
        self._unsaved: set[str] = set()
        """Tables that have been applied further than their notes say."""
        self._noted: set[str] = set()
        """Tables whose notes this object has written."""

    def read(self, topic: str, partition: int) -> AppliedPosition | None:
        """How far a partition's updates are applied; None: nothing says it."""
        table = self._topics.table_of(topic)
        if table is None or not self._rows.is_durable:
            return None
        return self._retries.call(lambda: read_applied(self._rows.note(table), topic)).get(partition)

    def include(self, table: str, reached: Mapping[Partition, AppliedPosition]) -> bool:
        """Whether a table's note says that as much is applied, by this process or another.

        Raises:
            UnavailableError, StoreError: the store cannot return the note at present.
        """
        note = self._rows.note(table)
        return all(wanted.is_within(read_applied(note, topic).get(p)) for (topic, p), wanted in reached.items())

    def note_write(self, table: str) -> None:
        """Updates have been written to a table since its note was saved."""
        if self._rows.is_durable:
            self._unsaved.add(table)

    def forget(self, topic: str) -> None:
        """Save a topic's positions again: what its table's note says of them no longer holds."""
        table = self._topics.table_of(topic)
        if table is not None:
            self.note_write(table)

    def save(self, applied: Mapping[Partition, AppliedPosition | None]) -> bool:
        """Save how far updates have been applied; returns whether there was anything to save.

        Raises:
            UnavailableError, StoreError: a store cannot take a note at present.
        """
        unsaved = sorted(self._unsaved)
        for table in unsaved:
            of_table = {one: how_far for one, how_far in applied.items() if self._topics.table_of(one[0]) == table}
            self._rows.save_note(table, with_applied(self._rows.note(table), of_table))
            self._unsaved.discard(table)
            self._noted.add(table)
        return bool(unsaved)

    def pushed_tables(self) -> set[str]:
        """Tables that were pushed again after their notes were saved, and so lack their updates.

        Raises:
            UnavailableError, StoreError: a store cannot return a note at present.
        """
        notes = {table: self._rows.note(table) for table in self._noted}
        pushed = {table for table, note in notes.items() if is_of_a_push(note) and not is_push_unfinished(note)}
        self._noted -= pushed
        return pushed
