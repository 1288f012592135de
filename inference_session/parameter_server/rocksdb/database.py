"""A RocksDB as `RocksDbStore` opens it: as its one writer, or as a reader that follows it; and its errors as ours.

A store replaces its `OpenDatabase` as a whole, to switch between reader and writer, or to other files.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from inference_session.errors import ConfigurationError, SessionClosedError, StoreError, UnavailableError, as_thrown
from inference_session.parameter_server.rocksdb.manifest_size import (
    CURRENT_FILE,
    IDENTITY_FILE,
    note_manifest_size,
    refuse_cut_manifest,
)
from inference_session.platform.file_names import path_for_library

try:
    from rocksdict import (
        AccessType,
        BlockBasedOptions,
        ChecksumType,
        DataBlockIndexType,
        DbClosedError,
        DBCompressionType,
        Options,
        Rdict,
        WriteBatch,
    )
except ImportError as missing:
    raise ConfigurationError(
        "a RocksDB store needs the package `rocksdict`: pip install 'hotrow[rocksdb]'"
    ) from missing

_LEAST_PACKAGE = (0, 3, 28)
"""Earlier releases of rocksdict write a batch into another column family, where nothing finds the rows."""
_MEMTABLE_BYTES = 8 << 20
"""Small enough for the processor's cache: a row is written in 60 % of the time that tables of 64 MiB take."""
_MEMTABLES_PER_FILE, _MAX_MEMTABLES = 8, 24
_ALL_MEMTABLES_BYTES = 512 << 20
_BLOCK_BYTES = 1024
_FILE_BYTES = 256 << 20
_LOG_BYTES = 1 << 20
"""RocksDB's own log, of which it keeps a few files."""
_LOCK_FILE = "LOCK"
_LOCKS = Path("/proc/locks")
_MAX_OPENED = 50
"""Times that a reader opens a database whose writer moves rows from its log to data files meanwhile."""

_CLOSE_TIMEOUT_S, _CLOSE_PAUSE_S = 10.0, 0.001
_IN_USE, _IN_CLOSING = "Already borrowed", "Already mutably borrowed"
"""What rocksdict says where a thread reads by a handle that is to be closed, and where one closes it meanwhile."""

_BEHIND_ALL_KEYS = b"\xff" * 9

_log = logging.getLogger(__name__)


class OpenDatabase:
    """A database as it was opened, and the column families that are in use. All methods may be called from any thread.

    A call that began with one ends with it, even if the store has replaced it meanwhile.
    """

    def __init__(self, path: Path, reader_folder: Path | None, *, may_create: bool = False) -> None:
        """Open as a reader, whose log goes to that folder, or (None) as the writer. Errors as of `translated`.

        `may_create`: a database is made if there is none. Else that is an UnavailableError.
        """
        self.is_writer = reader_folder is None
        self._path = path
        self._lock = threading.Lock()
        self._families: dict[str, Any] = {}
        self._seen: object = None
        """The state of the files when a reader last caught up."""
        with translated(path):
            self._open(reader_folder, may_create=may_create)
            weakref.finalize(self, os.close, hold_identity(path))
            self._identity = identity_of(path)

    def _open(self, reader_folder: Path | None, *, may_create: bool) -> None:
        """Open it, a reader as often as its writer moves rows meanwhile: it might see them in neither place."""
        for _ in range(_MAX_OPENED):
            self._manifest = state_of_manifest(self._path)
            self._tags = set(list_families(self._path))
            if reader_folder is None:
                self._db = open_writer(self._path, may_create=may_create)
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

    def clear(self, tag: str) -> None:
        """Drop the rows and the note of a table, all or nothing; UnavailableError if replaced.

        Its column family stays: where a writer drops one and makes it again, RocksDB crashes in processes that follow.
        """

        def drop(batch: Any) -> None:
            batch.delete(_note_name(tag))
            if self.family(tag) is not None:
                batch.delete_range(b"", _BEHIND_ALL_KEYS, self._db.get_column_family_handle(tag))

        self.write("default", drop)

    def refuse_replaced(self) -> None:
        """UnavailableError if there is no database at this one's path, or another."""
        if self.is_replaced():
            raise UnavailableError(f"the RocksDB at {str(self._path)!r} was replaced by another database")

    def write(self, tag: str, fill: Any) -> None:
        """Write a batch, which `fill` fills, to a column family: all of it or nothing; UnavailableError if replaced."""
        self.refuse_replaced()
        batch = write_batch()
        with translated(self._path):
            batch.set_default_column_family(self._db.get_column_family_handle(tag))
            fill(batch)
            self._db.write(batch)

    def sync(self) -> None:
        """Return when the disk has what was written."""
        with translated(self._path):
            self._db.flush_wal(sync=True)
        note_manifest_size(self._path)

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
            end = time.monotonic() + _CLOSE_TIMEOUT_S
            families, self._families = self._families, {}  # none is given out from now on
            for family in families.values():
                self._close_handle(family, end, flush=self.is_writer)
            self._close_handle(self._db, end)
        if self.is_writer:
            note_manifest_size(self._path)

    def _close_handle(self, handle: Any, end: float, *, flush: bool = False) -> None:
        """Close the database or a table. Rows that cannot be written now stay in the log, and are not lost."""
        try:
            with translated(self._path):
                if flush:
                    handle.flush()
                _close_unused(handle, end)
        except UnavailableError as error:
            kept = "; rows stay in the write-ahead log until it is opened again" if self.is_writer else ""
            _log.warning("the RocksDB at %r is not closed%s: %s", str(self._path), kept, error)


def _close_unused(handle: Any, end: float) -> None:
    """Close a handle once no thread reads by it; UnavailableError if one does at `end`, of the monotonic clock."""
    while _is_in_use(handle.close):
        if time.monotonic() > end:
            raise UnavailableError(f"a thread still reads from it after {_CLOSE_TIMEOUT_S:g} s")
        time.sleep(_CLOSE_PAUSE_S)


def _is_in_use(close: Callable[[], None]) -> bool:
    """Close a handle; True: a thread reads by it, and nothing was closed."""
    try:
        close()
    except RuntimeError as error:
        if _IN_USE not in str(error):
            raise
        return True
    return False


def open_writer(path: Path, *, may_create: bool) -> Any:
    """Open a database for writing; where there is none, it is made, or it is an UnavailableError."""
    if may_create:
        path.mkdir(parents=True, exist_ok=True)
    else:
        identity_of(path)
    refuse_cut_manifest(path)
    families = {name: family_options() for name in list_families(path)}
    options = family_options()
    options.create_if_missing(may_create)
    return Rdict(path_for_library(path), options=options, column_families=families)


def open_reader(path: Path, secondary_path: Path) -> Any:
    """Follow a database that another may be writing; `secondary_path` is a folder for RocksDB's own log."""
    refuse_absent(path)
    refuse_cut_manifest(path)
    with translated(path):
        _refuse_incomplete(path)
        return _open_as(path, AccessType.secondary(path_for_library(secondary_path)))


def _refuse_incomplete(path: Path, num_attempts: int = 5) -> None:
    """Raise where a data file is missing or cut: a secondary would take the database for an older one, without the rows
    in it; opening it read-only detects the loss.
    """
    try:
        _open_as(path, AccessType.read_only()).close()
    except Exception:
        if num_attempts == 1:
            raise
        # A live writer may just have merged a file into others and removed it.
        _refuse_incomplete(path, num_attempts - 1)


def _open_as(path: Path, access_type: Any) -> Any:
    families = {name: family_options() for name in stored_families(path)}
    return Rdict(path_for_library(path), options=family_options(), column_families=families, access_type=access_type)


def state_of_files(path: Path) -> object:
    """Differs once a writer has written anything. Catching up stops all threads of this process for some milliseconds,
    so it is not done without need.
    """
    return _state_of_files(path, lambda name: name.endswith(".log") or name.startswith("MANIFEST"))


def state_of_manifest(path: Path) -> object:
    """Differs once a writer has moved rows from its log to data files, or has merged these."""
    return _state_of_files(path, lambda name: name.startswith("MANIFEST"))


def _state_of_files(path: Path, is_wanted: Callable[[str], bool]) -> object:
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if is_wanted(entry.name)]
    except FileNotFoundError:  # a file has just been removed, so something has been written
        return object()
    return {(name, stat.st_size, stat.st_mtime_ns) for name, stat in found}


def identity_of(path: Path) -> object:
    """Differs once a path has another database: one that was created, moved or copied there; UnavailableError: none.

    Backups by hard links and changes of owner or mode make no other database of it, so the ctime is no part of this.
    Compare only while a handle of `hold_identity` is open: else another file may get the inode number.
    """
    stat = _identity_file(path).stat()
    return stat.st_dev, stat.st_ino, 0 if S_ISDIR(stat.st_mode) else stat.st_mtime_ns


def hold_identity(path: Path) -> int:
    """A handle on what `identity_of` looks at, for the caller to close."""
    return os.open(_identity_file(path), os.O_RDONLY | os.O_CLOEXEC)


def _identity_file(path: Path) -> Path:
    """The database's own file; where a copy lacks it, its folder."""
    if not (path / CURRENT_FILE).exists():
        raise UnavailableError(f"the RocksDB at {str(path)!r} does not exist any more")
    file = path / IDENTITY_FILE
    return file if file.exists() else path


def stored_families(path: Path) -> list[str]:
    """Names of a database's column families, `default` among them."""
    return Rdict.list_cf(path_for_library(path))


def list_families(path: Path) -> list[str]:
    """As `stored_families`; of a database that is yet to be made, those that it begins with."""
    return stored_families(path) if (path / CURRENT_FILE).exists() else ["default"]


def write_batch() -> Any:
    """An empty batch of writes of keys and rows as bytes."""
    return WriteBatch(raw_mode=True)


def family_options() -> Options:
    """Fixed-size rows, read by single random keys: small blocks with a hash index, found by a filter. A block cache in
    RocksDB would only hold the rows twice that the kernel keeps.

    Files are not mapped. RocksDB checks filters and indexes when it opens a file, and keeps its own copies of them. In
    a mapped file it would read them where they lie: damage would then hide rows, and a cut file end the process.
    """
    blocks = BlockBasedOptions()
    blocks.set_block_size(_BLOCK_BYTES)
    blocks.set_bloom_filter(10, block_based=False)
    blocks.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    blocks.set_data_block_hash_ratio(0.75)
    blocks.set_format_version(5)
    blocks.set_checksum_type(ChecksumType.xxh3())
    blocks.disable_cache()
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.none())  # trained float32 hardly shrinks
    options.set_allow_concurrent_memtable_write(False)  # a table has one writer, which needs no locks against others
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_min_write_buffer_number_to_merge(_MEMTABLES_PER_FILE)
    options.set_max_write_buffer_number(_MAX_MEMTABLES)  # a write that waits for the disk blocks all of this process
    options.set_memtable_prefix_bloom_ratio(0.02)
    options.set_memtable_whole_key_filtering(True)  # few of them need to be searched for a key
    options.set_db_write_buffer_size(_ALL_MEMTABLES_BYTES)
    options.set_max_total_wal_size(_ALL_MEMTABLES_BYTES)  # bounds memtables that wait for others to be merged with
    options.set_target_file_size_base(_FILE_BYTES)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_log_file_size(_LOG_BYTES)  # a reader writes some lines whenever it catches up
    options.set_keep_log_file_num(4)
    return options


def refuse_old_package() -> None:
    """ConfigurationError where the installed rocksdict is a release that loses rows."""
    try:
        found = metadata.version("rocksdict")
    except metadata.PackageNotFoundError:  # part of a program of one file
        return
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < _LEAST_PACKAGE:
        raise ConfigurationError(
            f"rocksdict {found} is installed, which writes rows where they are not found; a RocksDB store needs "
            f"{'.'.join(map(str, _LEAST_PACKAGE))} or later: pip install --upgrade 'hotrow[rocksdb]'"
        )


def refuse_absent(path: Path) -> None:
    """Raise a StoreError where there is no RocksDB."""
    if not (path / CURRENT_FILE).exists():
        raise StoreError(
            f"there is no RocksDB at {str(path)!r}; `hotrow push VERSION_DIR --to rocksdb://{path}` creates one"
        )


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Errors of RocksDB as ours."""
    try:
        yield
    except DbClosedError as error:
        raise SessionClosedError(f"the RocksDB at {str(path)!r} has been closed") from as_thrown(error)
    except OSError as error:
        text = str(error.strerror or error)  # what rocksdict raises has no number
        if any(os.strerror(number) in text for number in (errno.EROFS, errno.EACCES)):
            text += " (readers also need write access to its folder, where rocksdict keeps a file)"
        raise UnavailableError(f"the RocksDB at {str(path)!r} cannot be used: {text}") from as_thrown(error)
    except Exception as error:
        if type(error) is RuntimeError and _IN_CLOSING in str(error):
            raise SessionClosedError(f"the RocksDB at {str(path)!r} is being closed") from as_thrown(error)
        if type(error) is not Exception:  # which is all else that rocksdict raises
            raise
        raise _as_ours(path, str(error)) from as_thrown(error)


def _as_ours(path: Path, text: str) -> Exception:
    name, text = f"the RocksDB at {str(path)!r}", " ".join(text.split())
    if "LOCK" in text and "lock" in text:
        return UnavailableError(f"{name} is being written by {_lock_holder(path)}")
    kind = UnavailableError if text.startswith(("IO error", "Operation timed out", "Resource busy")) else StoreError
    return kind(f"{name}: {text}")


def _lock_holder(path: Path) -> str:
    """Which process holds the lock, for example `process 4711 (tritonserver, stopped)`.

    The file itself is not opened: closing it would end a lock that this process holds.
    """
    with suppress(OSError, ValueError, IndexError):
        stat = (path / _LOCK_FILE).stat()
        place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        for line in _LOCKS.read_text(encoding="ascii").splitlines():
            fields = line.split()
            if place in fields and fields[1] == "POSIX":
                return _describe(int(fields[4]))
    return "another process, or twice by this one"


def _describe(pid: int) -> str:
    if pid == os.getpid():
        return "another store of this process"
    with suppress(OSError, ValueError):
        begin, _, end = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        state = ", stopped" if end.split()[0] == "T" else ""
        return f"process {pid} ({begin.partition('(')[2]}{state})"
    return f"process {pid}"


def _note_name(tag: str) -> bytes:
    return b"hotrow_push/" + tag.encode()
