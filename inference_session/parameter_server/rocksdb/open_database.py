"""An open RocksDB, which a store replaces as a whole to switch between reader and writer or to other files."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference_session.errors import UnavailableError
from inference_session.parameter_server.rocksdb.database import (
    family_options,
    hold_identity,
    identity_of,
    list_families,
    open_reader,
    open_writer,
    state_of_files,
    state_of_manifest,
    stored_families,
    translated,
    write_batch,
)

_MAX_OPENED = 50
"""Times that a reader opens a database whose writer moves rows from its log to data files meanwhile."""

_log = logging.getLogger(__name__)


class OpenDatabase:
    """A database as it was opened, and the column families that are in use. All methods may be called from any thread.

    A call that began with one ends with it, even if the store has replaced it meanwhile.
    """

    def __init__(self, path: Path, reader_folder: Path | None) -> None:
        """Open as a reader, whose log goes to that folder, or (None) as the writer. Errors as of `translated`."""
        self.is_writer = reader_folder is None
        self._path = path
        self._lock = threading.Lock()
        self._families: dict[str, Any] = {}
        self._seen: object = None
        """The state of the files when a reader last caught up."""
        with translated(path):
            self._open(reader_folder)
            weakref.finalize(self, os.close, hold_identity(path))
            self._identity = identity_of(path)

    def _open(self, reader_folder: Path | None) -> None:
        """Open it, a reader as often as its writer moves rows meanwhile: it might see them in neither place."""
        for _ in range(_MAX_OPENED):
            self._manifest = state_of_manifest(self._path)
            self._tags = set(list_families(self._path))
            if reader_folder is None:
                self._db = open_writer(self._path)
                return
            self._db = open_reader(self._path, reader_folder)
            if self._has_same_manifest():
                return
            self._db.close()
        raise UnavailableError(f"the RocksDB at {str(self._path)!r} changes faster than a reader can open it")

    def is_replaced(self) -> bool:
        """Whether another database is at this one's path; UnavailableError where there is none."""
        with translated(self._path):
            return identity_of(self._path) != self._identity

    def let_go(self) -> bool:
        """Called before another replaces it in the store, or it is closed; False: it must not be closed.

        When a writer is closed, it writes files by name into the folder now at its path: RocksDB so damages a
        database that has taken its place. Such a writer stays open, without its background work, until the process
        ends.
        """
        if not self.is_writer:
            return True
        with suppress(UnavailableError):
            if not self.is_replaced():
                return True
        self._db.cancel_all_background(True)
        for handle in (self._db, *self._families.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # never closed, not even at interpreter exit
        return False

    def family(self, tag: str) -> Any:
        """A table's column family, None if it has none (yet)."""
        if tag not in self._tags:
            return None
        family = self._families.get(tag)
        if family is None:
            with translated(self._path), self._lock:
                family = self._families[tag] = self._db.get_column_family(tag)
        return family

    def create_family(self, tag: str) -> Any:
        """The table's column family, made if there is none."""
        with translated(self._path), self._lock:
            if tag not in self._tags:
                self._families[tag] = self._db.create_column_family(tag, family_options())
                self._tags = self._tags | {tag}
        return self.family(tag)

    def drop(self, tags: Collection[str]) -> None:
        """Drop column families and their notes."""
        with translated(self._path), self._lock:
            for tag in tags:
                self._db.delete(_note_name(tag))
                if tag in self._tags:
                    self._tags = self._tags - {tag}
                    self._families.pop(tag, None)
                    self._db.drop_column_family(tag)

    def note(self, tag: str) -> bytes | None:
        """The note of a table."""
        with translated(self._path):
            found: bytes | None = self._db.get(_note_name(tag))
        return found

    def put_note(self, tag: str, note: bytes) -> None:
        """Store a note for a table."""
        with translated(self._path):
            self._db.put(_note_name(tag), note)

    def write(self, tag: str, fill: Any) -> None:
        """Write a batch, which `fill` fills, to a table at once: all of it or nothing; UnavailableError if replaced."""
        if self.is_replaced():
            raise UnavailableError(f"the RocksDB at {str(self._path)!r} was replaced by another database")
        batch = write_batch()
        with translated(self._path):
            batch.set_default_column_family(self._db.get_column_family_handle(tag))
            fill(batch)
            self._db.write(batch)

    def sync(self) -> None:
        """Return when the disk has what was written."""
        with translated(self._path):
            self._db.flush_wal(sync=True)

    def catch_up(self, tags: Collection[str]) -> bool:
        """See what the writer has written since; False: open it again, because the writer has made or dropped one of
        these, or has moved rows from its log to data files.

        RocksDB passes over what it has not yet read of a log whose rows are in data files by now, and answers the older
        rows that it has read from that log, until the writer writes to the same table again.
        """
        with translated(self._path), self._lock:
            state = state_of_files(self._path)
            if state == self._seen:
                return True
            if not {*tags}.isdisjoint({*stored_families(self._path)} ^ self._tags):
                return False
            if self._has_same_manifest():
                self._db.try_catch_up_with_primary()
            if not self._has_same_manifest():
                return False
            self._seen = state
        return True

    def _has_same_manifest(self) -> bool:
        return state_of_manifest(self._path) == self._manifest

    def close(self) -> None:
        """Close it. A writer leaves no log that readers would have to go through."""
        if not self.let_go():
            return
        with self._lock:
            for family in self._families.values():
                self._close_handle(family, flush=self.is_writer)
            self._close_handle(self._db)
            self._families = {}

    def _close_handle(self, handle: Any, *, flush: bool = False) -> None:
        """Close the database or a table. Rows that cannot be written now stay in the log, and are not lost."""
        try:
            with translated(self._path):
                if flush:
                    handle.flush()
                handle.close()
        except UnavailableError as error:
            _log.warning("rows stay in the write-ahead log until the database is opened again: %s", error)


def _note_name(tag: str) -> bytes:
    return b"hotrow_push/" + tag.encode()
