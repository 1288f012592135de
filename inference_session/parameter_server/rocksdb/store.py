"""RocksDB as a tier: a column family per table (its tag), key 8 bytes little endian → row float32, as HPS lays them.

A database has one writer at a time. Any number of readers, in this process or others, follow it as RocksDB's
*secondaries*: they see what was there when they opened or last refreshed. Nothing a writer has inserted is lost when
its process dies; rows that a table's note counts survive a machine failure as well. A database that is replaced by
another at the same path is opened again.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import StoreError, UnavailableError
from inference_session.parameter_server.base import EmbeddingStore, check_insert
from inference_session.parameter_server.namespace import Namespace, StoredTable
from inference_session.parameter_server.rocksdb.database import (
    OpenDatabase,
    list_families,
    open_reader,
    refuse_absent,
    refuse_old_package,
    stored_families,
    translated,
)
from inference_session.platform.drafts import working_folder
from inference_session.platform.pacing import Rests
from inference_session.tables.base import SCAN_BYTES, RowBatch, check_fetch

_KEYS_PER_MULTIGET = 2048
"""More of them are sorted first, because then neighbours in the files are often read together; and few enough that
their rows are still in the processor's cache when they are copied."""
_BYTES_PER_BATCH = 8 << 20
"""Bytes of rows that are sorted together."""
_BYTES_PER_WRITE = 64 << 10
"""While RocksDB writes, no other thread of this process runs Python; they may between two writes."""
_NO_SPACE = "No space left on device"

_log = logging.getLogger(__name__)


class RocksDbStore(EmbeddingStore):
    """The tables of one model in a RocksDB."""

    def __init__(
        self,
        path: Path,
        namespace: Namespace,
        embedding_dims: Mapping[str, int],
        *,
        writable: bool | Literal["later"] = False,
    ) -> None:
        """See `parameter_server.create.create_store`.

        With `writable=True` the database is made if there is none. A reader of a damaged database raises an
        UnavailableError in each call, until the database is repaired.
        """
        refuse_old_package()
        self.path = path
        self.namespace = namespace
        self._may_write = writable is not False
        self._may_write_now = True
        """False: the database was replaced while this process was its writer."""
        super().__init__(embedding_dims)
        self._tags = {table: namespace.tag(table) for table in embedding_dims}
        self._lock = threading.Lock()  # held while the database is opened or closed
        self._rests = Rests()
        self._opened: OpenDatabase | None = None
        """Replaced as a whole, so that every call sees one state of it."""
        self._folders = ExitStack()
        self._reader_folder: Path | None = None
        """None: a writer from the beginning, such as a push, which never is a reader."""
        if writable is True:
            self._opened = OpenDatabase(path, None, may_create=True)
        else:
            refuse_absent(path)
            self._reader_folder = self._folders.enter_context(_reader_folder())
            with suppress(UnavailableError):
                self.database()

    @property
    def lags(self) -> bool:
        """A reader does."""
        return self._opened is None or not self._opened.is_writer

    def num_rows(self, table: str) -> int:
        """Number of rows; reads all keys, because RocksDB itself does not know."""
        family = self.family(table)
        with translated(self.path):
            return 0 if family is None else _count(family)

    def fetch(self, table: str, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        family = self.family(table)
        check_fetch(keys, out, self.embedding_dim(table))
        if family is None:
            return np.zeros(len(keys), np.bool_)
        if len(keys) <= _KEYS_PER_MULTIGET:
            return self._fetch(table, family, keys, out)
        order, found = _order_in_files(keys), np.empty(len(keys), np.bool_)
        for begin in range(0, len(keys), _KEYS_PER_MULTIGET):
            part = order[begin : begin + _KEYS_PER_MULTIGET]
            vectors = np.empty((len(part), out.shape[1]), np.float32)
            hits = found[part] = self._fetch(table, family, keys[part], vectors)
            out[part[hits]] = vectors[hits]
        return found

    def scan(self, table: str) -> Iterator[RowBatch]:
        """See EmbeddingStore. As of the moment when the first batch is asked for."""
        family = self.family(table)
        if family is None:
            return
        row_bytes = 4 * self.embedding_dim(table)
        items = family.items()
        while True:
            with translated(self.path):
                batch = list(itertools.islice(items, max(1, SCAN_BYTES // row_bytes)))
            if not batch:
                return
            yield self._rows_of(table, batch)

    def _rows_of(self, table: str, items: Sequence[tuple[bytes, bytes]]) -> RowBatch:
        """Those that are keys and rows; other keys are counted here, other rows where they are placed."""
        good = [(key, row) for key, row in items if len(key) == 8]
        if len(good) < len(items):
            num_other = len(items) - len(good)
            self._malformed.add(self, table, f"{num_other} keys are not 8 bytes long, as an int64 is", num_other)
        keys = np.frombuffer(b"".join(key for key, _ in good), "<i8").astype(np.int64)
        vectors = np.empty((len(keys), self.embedding_dim(table)), np.float32)
        found = self._place(table, keys, [row for _, row in good], vectors)
        return keys[found], vectors[found]

    def prepare_write(self) -> None:
        """See EmbeddingStore. Fails while another process is the writer, and where the database is gone or damaged."""
        self._become_writer().refuse_replaced()

    def insert(self, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        check_insert(keys, vectors, self.embedding_dim(table))
        opened = self._become_writer()
        self._create_family(opened, table)
        step = max(1, _BYTES_PER_BATCH // (4 * vectors.shape[1]))
        for begin in range(0, len(keys), step):
            self._insert(opened, table, keys[begin : begin + step], vectors[begin : begin + step])

    def erase(self, table: str, keys: NDArray[np.int64]) -> None:
        self.embedding_dim(table)
        opened = self._become_writer()
        if opened.family(self._tags[table]) is not None:
            self._write(opened, table, lambda batch: [batch.delete(key) for key in _as_bytes(keys)])

    def clear(self, table: str) -> None:
        """See EmbeddingStore. Readers keep what they see until they refresh."""
        self.embedding_dim(table)
        self._become_writer().clear(self._tags[table])

    def versions(self) -> set[str]:
        self._refuse_if_closed()
        with translated(self.path):
            return set(filter(None, map(self.namespace.version_of, list_families(self.path))))

    def remove_versions(self, versions: Collection[str]) -> int:
        opened = self._become_writer()
        with translated(self.path):
            tags = {tag for tag in list_families(self.path) if self.namespace.version_of(tag) in versions}
        opened.drop(tags)
        return len(tags)

    def check(self) -> None:
        self._current()

    def refresh(self) -> None:
        """See EmbeddingStore. Tables that were made since are found as well, and a database that was replaced."""
        opened = self._current()
        if not opened.is_writer and not opened.catch_up(self._tags.values()):
            self.reopen(opened)

    def note(self, table: str) -> str | None:
        self.embedding_dim(table)
        text = self.database().note(self._tags[table])
        return None if text is None else text.decode()

    def set_note(self, table: str, text: str) -> None:
        """See EmbeddingStore. Waits until the disk has all that was inserted before."""
        self.embedding_dim(table)
        opened = self._become_writer()
        opened.put_note(self._tags[table], text.encode())
        opened.sync()

    def close(self) -> None:
        """Close the database. A writer leaves no log that readers would have to go through."""
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()
                self._opened = None  # a database that cannot be closed is abandoned
        self._folders.close()

    def __repr__(self) -> str:
        role = "reader" if self.lags else "writer"
        return f"<RocksDbStore {str(self.path)!r} [{self.namespace}, {len(self._embedding_dims)} tables, {role}]>"

    def database(self) -> OpenDatabase:
        """The database, opened if it could not be before."""
        opened = self._opened
        if opened is None:
            with self._lock:
                self._refuse_if_closed()
                opened = self._opened = self._opened or self._open_reader()
        return opened

    def _current(self) -> OpenDatabase:
        """The database, the one that is at the path now; UnavailableError where there is none."""
        opened = self.database()
        if opened.is_replaced():
            _log.warning(
                "the RocksDB at %r was replaced by another database, which is open now; cached rows stay until they are"
                " refreshed",
                str(self.path),
            )
            self.reopen(opened)
        return self.database()

    def _open_reader(self) -> OpenDatabase:
        if self._reader_folder is None:
            raise UnavailableError(f"the RocksDB at {str(self.path)!r} was replaced during a write")
        try:
            return OpenDatabase(self.path, self._reader_folder)
        except StoreError as error:
            raise UnavailableError(f"{error} (restore it, or push into another folder)") from error

    def reopen(self, opened: OpenDatabase) -> None:
        """Become a reader of the database now at the path. Calls under way keep the previous one until they end."""
        with self._lock:
            if self._opened is opened:
                reader = self._open_reader()
                self._may_write_now &= opened.let_go()
                self._opened = reader

    def _become_writer(self) -> OpenDatabase:
        """Become the database's one writer, if possible and not done already."""
        if not self._may_write:
            self._refuse_if_closed()
            raise StoreError(f"{self!r} is read-only: it was not opened as the database's writer")
        with self._lock:
            self._refuse_if_closed()
            if not self._may_write_now:
                raise UnavailableError(
                    f"the RocksDB at {str(self.path)!r} was replaced while this process was its writer: it is read, and"
                    " can be written to by this process once that is started again"
                )
            if self._opened is None or not self._opened.is_writer:
                self._opened = OpenDatabase(self.path, None)
            return self._opened

    def _create_family(self, opened: OpenDatabase, table: str) -> None:
        """Make the table's column family if there is none. One that the disk had no room for may exist anyway,
        but only for those that open the database later: so this becomes a reader again, and the writer by the next
        write.
        """
        try:
            opened.create_family(self._tags[table])
        except (StoreError, UnavailableError) as error:
            if self._reader_folder is not None:
                with suppress(UnavailableError):
                    self.reopen(opened)
            raise UnavailableError(f"table {table!r} cannot be created; the next write tries again: {error}") from error

    def family(self, table: str) -> Any:
        """The table's column family, None if it has none (yet)."""
        self.embedding_dim(table)
        return self.database().family(self._tags[table])

    def _insert(self, opened: OpenDatabase, table: str, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Insert rows in the order in which RocksDB keeps them in memory, which is twice as fast as any other."""
        if not _is_in_order(keys):
            order = _order_in_files(keys)
            keys, vectors = keys[order], vectors[order]
        rows = _as_bytes(keys), _as_bytes(vectors.astype("<f4", copy=False))
        step = max(1, _BYTES_PER_WRITE // (4 * vectors.shape[1]))
        for begin in range(0, len(keys), step):
            part = [column[begin : begin + step] for column in rows]
            self._write(opened, table, lambda batch, part=part: deque(map(batch.put, *part), 0))  # type: ignore[misc]
            if self._reader_folder is not None:  # a writer from the beginning is no server
                self._rests.rest()

    def _write(self, opened: OpenDatabase, table: str, fill: Callable[[Any], object]) -> None:
        """Write a batch, which `fill` fills, to the table at once: all of it or nothing.

        After a failed write RocksDB accepts no more until it is reopened, so that this becomes a reader again,
        and the writer by the next write; only where there was no space does RocksDB go on by itself.
        """
        try:
            opened.write(self._tags[table], fill)
        except UnavailableError as error:
            if _NO_SPACE not in str(error) and self._reader_folder is not None:
                with suppress(UnavailableError):
                    self.reopen(opened)
            raise

    def _fetch(self, table: str, family: Any, keys: NDArray[np.int64], out: NDArray[np.float32]) -> NDArray[np.bool_]:
        with translated(self.path):
            rows = family.get(_as_bytes(keys))
        return self._place(table, keys, rows, out)

    def _place(
        self, table: str, keys: NDArray[np.int64], rows: list[bytes | None], out: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Write the rows found to their places in `out`; returns which were found. Counts malformed ones."""
        expected = 4 * out.shape[1]
        good = [row is not None and len(row) == expected for row in rows]
        vectors = np.frombuffer(b"".join(itertools.compress(rows, good)), "<f4").reshape(-1, out.shape[1])  # type: ignore[arg-type]
        if len(vectors) == len(rows):
            out[:] = vectors
            return np.ones(len(rows), np.bool_)
        found = np.array(good, np.bool_)
        out[found] = vectors
        for key, row in itertools.compress(zip(keys, rows, strict=True), ~found):
            if row is not None:
                self._malformed.add_row(self, table, int(key), len(row), expected)
        return found


def list_rocksdb_tables(path: Path) -> list[StoredTable]:
    """All tables of all models in a RocksDB. Counts their rows one by one."""
    with _reader_folder() as folder, translated(path):
        db = open_reader(path, folder)
        tags = sorted(set(stored_families(path)) - {"default"})
        tables = []
        for tag in tags:
            family = db.get_column_family(tag)
            row_bytes = next((len(row) for row in family.values()), None)
            tables.append(StoredTable(tag, _count(family), None if row_bytes is None else row_bytes // 4))
            family.close()
        db.close()
    return tables


def _reader_folder() -> AbstractContextManager[Path]:
    """The folder in which RocksDB keeps a reader's own log."""
    return working_folder(Path(tempfile.gettempdir()), "hotrow-rocksdb-reader-")


def _order_in_files(keys: NDArray[np.int64]) -> NDArray[np.intp]:
    """The order of keys by their bytes, in which files hold them; equal keys stay in their order."""
    return np.argsort(_by_first_byte(keys), kind="stable")


def _is_in_order(keys: NDArray[np.int64]) -> bool:
    """Whether they are as `_order_in_files` would have them, as those of an update stream are."""
    numbers = _by_first_byte(keys)
    return bool((numbers[:-1] <= numbers[1:]).all())


def _by_first_byte(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Numbers that order keys as their bytes do."""
    numbers: NDArray[np.uint64] = keys.byteswap().view(np.uint64)
    return numbers


def _as_bytes(rows: NDArray[np.generic]) -> list[bytes]:
    """The bytes of each row."""
    rows = np.ascontiguousarray(rows)
    num_elements = math.prod(rows.shape[1:])
    whole = f"V{rows.itemsize * num_elements}"
    as_list: list[bytes] = rows.reshape(len(rows), num_elements).view(whole).reshape(-1).tolist()
    return as_list


def _count(family: Any) -> int:
    keys: Iterator[bytes] = family.keys()
    return sum(1 for _ in keys)
