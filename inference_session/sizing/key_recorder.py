"""Records which keys a session looks up, for `hotrow size`: a bounded file per table, written by a thread.

A recording is a folder:

    trace.json           per table: `num_keys` looked up; `dropped_keys`: lost while too many waited to be written
    <table>.<n>.keys     int64, little endian, in the order of the look-ups: all uses of 2**-n of the keys

A hash decides which keys are recorded (sizing/key_sample.py). When a file has grown to its share of the bytes, half of
its keys are dropped, and the rest go into a file of the next n: it stays a fair sample of the whole recording.
trace.json is brought up to date once a second. While the disk is full, keys are dropped.
"""

from __future__ import annotations

import errno
import json
import logging
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.config import SessionConfig
from inference_session.errors import ConfigurationError, TraceFormatError
from inference_session.kernels.cpu.keys import compile_kernels, copy_keys
from inference_session.kernels.records import KEY_BYTES, Lookup
from inference_session.model_spec import is_folder_name
from inference_session.sizing.key_sample import sampled_keys
from inference_session.sizing.trace_file import TracePart, read_trace
from inference_session.version_directory.version import VersionDirectory

RECORDING_FILE = "trace.json"
_KEYS_SUFFIX = ".keys"
_MAX_WAITING_BYTES = 32 << 20
_INTERVAL_S = 1.0
_MOST_HALVINGS = 62
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a file system answers that has no room, or gives no more to this user or process."""

_log = logging.getLogger(__name__)


class _Batch(NamedTuple):
    """The keys of one look-up."""

    tables: NDArray[np.int64]
    """[segments]: which table's keys a segment holds."""
    counts: NDArray[np.int64]
    """[segments]: how many."""
    keys: NDArray[np.int64]


class KeyRecorder:
    """Writes the keys that `record` gets to its own folder, until closed. Thread-safe."""

    def __init__(self, folder: Path, tables: tuple[str, ...], *, max_bytes: int) -> None:
        """Start a recording in `folder`, which exists, of these tables, in `max_bytes` in all."""
        compile_kernels()
        self.folder = folder
        self._files = [_KeyFile(folder, table, max_bytes // len(tables)) for table in tables]
        self._tables = tables
        self._waiting: deque[_Batch] = deque()
        self._waiting_bytes = 0
        self._num_dropped = 0
        self._has_news = False
        """Whether trace.json is to be written."""
        self._is_full_reported = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._write_summary()
        self._thread = threading.Thread(target=self._work, name="hotrow-key-recorder", daemon=True)
        self._thread.start()

    def record(self, lookup: Lookup) -> None:
        """Note the keys of a look-up."""
        if self._closing.is_set():
            return
        segments, num_keys = lookup.segments, lookup.num_keys
        num_all = int(num_keys.sum())
        with self._lock:
            if self._waiting_bytes + num_all * KEY_BYTES > _MAX_WAITING_BYTES:
                self._num_dropped += num_all
                return
            self._waiting_bytes += num_all * KEY_BYTES
        keys = np.empty(num_all, np.int64)
        copy_keys(segments, keys)
        with self._lock:
            self._waiting.append(_Batch(segments["table"].copy(), num_keys.copy(), keys))

    def close(self) -> None:
        """Write the keys that wait, and end. May be called more than once."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closing.wait(_INTERVAL_S):
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            _log.warning("recording of keys in %s stopped: %s", self.folder, error)
            self._closing.set()
        finally:
            for file in self._files:
                file.close()

    def _write_waiting(self) -> None:
        with self._lock:
            batches, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
        self._has_news |= bool(batches)
        for t, keys in self._by_table(batches):
            self._append(self._files[t], keys)
        if self._has_news:
            try:
                self._write_summary()
                self._has_news = False
            except OSError as error:
                self._pass_over_full_disk(error)

    def _append(self, file: _KeyFile, keys: NDArray[np.int64]) -> None:
        num_keys = file.num_keys + len(keys)
        try:
            file.append(keys)
            while file.is_full:
                file.thin()
        except OSError as error:
            self._pass_over_full_disk(error)
            self._num_dropped += num_keys - file.num_keys

    def _pass_over_full_disk(self, error: OSError) -> None:
        """Report a full disk once; other errors are raised."""
        if error.errno not in _FULL:
            raise error
        if not self._is_full_reported:
            self._is_full_reported = True
            _log.warning(
                "recording of keys in %s: keys are dropped until there is room: %s", self.folder, error.strerror
            )

    def _by_table(self, batches: deque[_Batch]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for batch in batches:
            begin = 0  # a request without samples has no segment
            for table, count in zip(batch.tables.tolist(), batch.counts.tolist(), strict=True):
                yield table, batch.keys[begin : begin + count]
                begin += count

    def _write_summary(self) -> None:
        tables = {table: {"num_keys": file.num_keys} for table, file in zip(self._tables, self._files, strict=True)}
        written = self.folder / f".{RECORDING_FILE}"
        written.write_text(json.dumps({"tables": tables, "dropped_keys": self._num_dropped}, indent=1) + "\n")
        written.replace(self.folder / RECORDING_FILE)


class _KeyFile:
    """The sampled keys of one table."""

    def __init__(self, folder: Path, table: str, max_bytes: int) -> None:
        self.num_keys = 0
        self._halvings = 0
        self._folder = folder
        self._table = table
        self._max_bytes = max_bytes
        self._file: IO[bytes] = self._path(0).open("wb", buffering=0)

    @property
    def is_full(self) -> bool:
        return self._file.tell() > self._max_bytes and self._halvings < _MOST_HALVINGS

    def _path(self, halvings: int) -> Path:
        return self._folder / f"{self._table}.{halvings}{_KEYS_SUFFIX}"

    def append(self, keys: NDArray[np.int64]) -> None:
        """Write all keys [n], or none: OSError."""
        begin = self._file.tell()
        try:
            _write(self._file, sampled_keys(keys, self._halvings))
        except OSError:
            self._file.truncate(begin)
            self._file.seek(begin)
            raise
        self.num_keys += len(keys)

    def thin(self) -> None:
        """Keep half of the keys, in a new file, which readers find once it is complete."""
        old, new = self._path(self._halvings), self._path(self._halvings + 1)
        kept = sampled_keys(np.fromfile(old, "<i8").astype(np.int64, copy=False), self._halvings + 1)
        unfinished = new.with_name(f".{new.name}")
        file = unfinished.open("wb", buffering=0)
        try:
            _write(file, kept)
            unfinished.replace(new)
        except OSError:
            file.close()
            unfinished.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file, self._halvings = file, self._halvings + 1
        old.unlink()

    def close(self) -> None:
        self._file.close()


def _write(file: IO[bytes], keys: NDArray[np.int64]) -> None:
    left = keys.astype("<i8", copy=False).view(np.uint8).data
    while left:
        left = left[file.write(left) :]  # a disk that is almost full takes a part


def create_key_recorder(version: VersionDirectory, config: SessionConfig) -> KeyRecorder | None:
    """The recorder that the settings ask for, in a new folder below `record_keys`; None where they ask for none.

    Raises:
        ConfigurationError: the folder cannot be made.
    """
    if not config.record_keys or not version.spec.tables:
        return None
    try:
        Path(config.record_keys).mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"{version.model}-{version.version}-", dir=config.record_keys)
    except OSError as error:
        raise ConfigurationError(f"setting 'record_keys' cannot be {config.record_keys!r}: {error}") from error
    return KeyRecorder(Path(folder), tuple(t.folder for t in version.spec.tables), max_bytes=config.record_keys_bytes)


def read_recording(folder: Path) -> Iterator[TracePart]:
    """The keys of a recording, table by table, piece by piece; also of one that is still being written.

    Raises:
        TraceFormatError: the folder is no recording; names it.
    """
    for table, num_keys in _read_summary(folder):
        halvings, path = _newest_file(folder, table)
        yield TracePart(table, np.empty(0, np.int64), num_keys, halvings)
        for part in read_trace(path, "int64"):
            yield TracePart(table, part.keys, 0, halvings)


def _newest_file(folder: Path, table: str) -> tuple[int, Path]:
    """The file with the lowest sampling rate: the others are about to be removed."""
    found = {path.name.split(".")[-2]: path for path in folder.glob(f"{table}.*{_KEYS_SUFFIX}")}
    numbered = [(int(number), path) for number, path in found.items() if number.isdecimal()]
    if not numbered or (newest := max(numbered))[0] > _MOST_HALVINGS:
        raise TraceFormatError(
            f"{folder}: {RECORDING_FILE} names table {table!r}, but the file with its keys is missing"
        )
    return newest


def _read_summary(folder: Path) -> list[tuple[str, int]]:
    """Tables and how many keys were looked up in each."""
    path = folder / RECORDING_FILE
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        summary = [(str(name), int(table["num_keys"])) for name, table in tables.items()]
    except FileNotFoundError as error:
        below = ", ".join(sorted(str(found.parent) for found in folder.glob(f"*/{RECORDING_FILE}"))) or "none"
        raise TraceFormatError(
            f"{folder}: not a recording, because it has no {RECORDING_FILE}; recordings below it: {below}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise TraceFormatError(f"{path}: not readable as the summary of a recording: {error}") from error
    if any(num_keys < 0 or not is_folder_name(name) for name, num_keys in summary):
        raise TraceFormatError(f"{path}: invalid table name or num_keys")
    return summary
