"""Table files into a store: in batches, resumable, verifiable.

How far a push has come is kept as the table's note in the store itself, after the rows it counts: a push that is
begun again goes on from there if the files are the same, and from the start if they are not or if it had ended. Where
the note changes during a push, the store has rows of another push as well, or has lost some.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError
from inference_session.model_spec import TABLES_FOLDER, TableSpec
from inference_session.parameter_server.base import ERASED_SUFFIX, EmbeddingStore
from inference_session.parameter_server.table_source import noted_source, push_note, source_of
from inference_session.platform.json_records import own_fields
from inference_session.platform.progress import Progress
from inference_session.tables.table_file import TableFile
from inference_session.version_directory.manifest import read_manifest

BYTES_PER_BATCH = 4 << 20
NOTE_INTERVAL_S = 1.0
_SEVERAL = "several"
"""Stands for the files that a table was filled from where two pushes have mixed theirs."""


@dataclass(frozen=True)
class PushReport:
    """What pushing one table did."""

    table: str
    num_rows: int
    """Rows of the table."""
    num_resumed: int
    """Rows among these that an earlier push had written already."""


class TablePush:
    """The push of one table of a version directory."""

    def __init__(self, version_dir: Path, spec: TableSpec, store: EmbeddingStore, *, drops_others: bool = True) -> None:
        """Open the table's files; ModelFormatError names one that is absent or has an unexpected size.

        `drops_others`: where the store has rows of other files, as of a removed version of that number, they are
        dropped first. Keys that these files lack would be answered by them.
        """
        folder = version_dir / TABLES_FOLDER / spec.folder
        self.spec = spec
        self._store = store
        self._drops_others = drops_others
        self._file = TableFile.open(folder, spec, verify_index=True)
        self.source = source_of(read_manifest(version_dir), spec)
        """Names the files."""
        self._noted: str | None = None
        """The note, as this push has written it."""

    def run(self, progress: Progress | None = None) -> PushReport:
        """Write the rows that are not yet written; of rows with equal keys the last one, as look-ups see it."""
        first_row, self._noted = self._rows_done(), None
        if self._drops_others and noted_source(self._store, self.spec) not in (None, self.source):
            for table in {self.spec.folder, self.spec.folder + ERASED_SUFFIX}.intersection(self._store.tables):
                self._store.clear(table)
        self._store.forget_applied(self.spec.folder)
        self._note(first_row)  # before any of the rows: sessions on other files must not take the store for theirs
        noted = time.monotonic()
        for begin, keys, vectors in self._batches(first_row):
            self._store.insert(self.spec.folder, keys, vectors)
            if time.monotonic() - noted >= NOTE_INTERVAL_S:
                self._note(begin + len(keys))
                noted = time.monotonic()
            if progress is not None:
                progress(len(keys))
        self._store.forget_applied(self.spec.folder)  # updates that were written meanwhile
        self._note(self.spec.num_rows)
        return PushReport(self.spec.folder, self.spec.num_rows, first_row)

    def verify(self, num_samples: int | None = None, progress: Progress | None = None) -> int:
        """Read rows back and compare them bit by bit; returns how many. None: all rows; else random ones.

        Raises:
            StoreError: names the first key whose row is missing or differs.
        """
        keys = self._file.keys()
        if num_samples is not None and num_samples < len(keys):
            keys = keys[np.sort(np.random.default_rng().choice(len(keys), num_samples, replace=False))]
        for begin in range(0, len(keys), self._rows_per_batch):
            part = np.ascontiguousarray(keys[begin : begin + self._rows_per_batch])
            self._compare(part)
            if progress is not None:
                progress(len(part))
        return len(keys)

    @property
    def _rows_per_batch(self) -> int:
        return max(1, BYTES_PER_BATCH // (4 * self.spec.embedding_dim))

    def _batches(self, first_row: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
        keys = self._file.keys()
        for begin in range(first_row, len(keys), self._rows_per_batch):
            part = np.ascontiguousarray(keys[begin : begin + self._rows_per_batch])
            yield begin, part, self._vectors(part)

    def _vectors(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        vectors = np.empty((len(keys), self.spec.embedding_dim), np.float32)
        self._file.fetch(keys, vectors)
        return vectors

    def _compare(self, keys: NDArray[np.int64]) -> None:
        expected = self._vectors(keys)
        stored = np.zeros_like(expected)
        found = self._store.fetch(self.spec.folder, keys, stored)
        same = found & (stored.view(np.uint32) == expected.view(np.uint32)).all(axis=1)
        if not same.all():
            first = int(np.argmin(same))
            what = "differs from the files" if found[first] else "is missing"
            raise StoreError(
                f"table {self.spec.name!r}: the row of key {keys[first]} {what} in {self._store!r}"
                f" ({int((~same).sum())} of {len(keys)} rows of this batch are wrong); push again,"
                " or check whether the store evicts rows, as a Redis with a maxmemory-policy does"
            )

    def _rows_done(self) -> int:
        note = own_fields(self._store.note(self.spec.folder))
        rows = note.get("rows") if note.get("source") == self.source else None
        return rows if type(rows) is int and 0 < rows < self.spec.num_rows else 0

    def _note(self, num_rows: int) -> None:
        if self._noted is not None:
            self._refuse_another_note()
        self._noted = push_note(self.source, num_rows, self.spec.num_rows)
        self._store.set_note(self.spec.folder, self._noted)

    def _refuse_another_note(self) -> None:
        """Raise if the note is not the one that this push has written. A push of other files, whose rows this one may
        have overwritten, is told so by another note.
        """
        if self._store.note(self.spec.folder) == self._noted:
            return
        if noted_source(self._store, self.spec) not in (None, self.source):
            self._store.set_note(self.spec.folder, push_note(_SEVERAL, 0, self.spec.num_rows))
        raise StoreError(
            f"table {self.spec.name!r}: {self._store!r} has changed during the push: another push writes to the table,"
            " the store came back older or empty, or it evicts rows, as a Redis with a maxmemory-policy does; wait"
            " until the push is alone, or give the store more memory, and push again"
        )
