"""Which rows are hot, kept in a file, so that the next version, or the next process, starts with them in its cache.

The file (state_file.py) holds a line of JSON, `{"tables": {folder: number of keys}}`, then the keys of these tables in
that order, int64, little endian, the hottest of each table first.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import UnavailableError
from inference_session.platform.repeated_call import RepeatedCall
from inference_session.platform.state_file import read_state, write_state
from inference_session.tables.base import HotKeys

MAX_KEYS = 1 << 24
"""Keys in a file, 128 MiB of them. Beyond that, each table leaves out the same fraction, its least hot keys."""
INTERVAL_S = 1.0
"""The shortest time between two writes."""
_MAX_LOAD = 0.02
"""The part of one core's time that may go into writing."""

_log = logging.getLogger(__name__)


def write_hot_keys(path: Path, keys: HotKeys) -> None:
    """Write the file; OSError if it cannot be written."""
    kept = min(1.0, MAX_KEYS / max(sum(map(len, keys.values())), 1))
    arrays = {table: array[: int(len(array) * kept)] for table, array in keys.items()}
    header = json.dumps({"tables": {table: len(array) for table, array in arrays.items()}}).encode()
    write_state(path, b"\n".join((header, b"".join(array.astype("<i8").tobytes() for array in arrays.values()))))


def read_hot_keys(path: Path) -> dict[str, NDArray[np.int64]]:
    """What was written, int64 [n] by table; nothing if the file is missing or damaged."""
    header, _, data = (read_state(path) or b'{"tables": {}}').partition(b"\n")
    try:
        tables = json.loads(header)["tables"]
        keys = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
        return dict(zip(tables, np.split(keys, np.cumsum(list(tables.values()))), strict=False))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a complete file of another kind
        _log.warning("ignoring %s: not a file of hot keys: %r", path, error)
        return {}


def interleaved(lists: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The hot keys of several caches of a table, int64 [n] each: each key once, the hottest of each cache first."""
    if len(lists) == 1:
        return lists[0]
    places = np.concatenate([np.arange(len(keys)) for keys in lists])
    keys: NDArray[np.int64] = np.concatenate(lists)[np.argsort(places, kind="stable")]
    _, first = np.unique(keys, return_index=True)
    return keys[np.sort(first)]


class HotKeysWriter:
    """Writes the file repeatedly, as long as there is news, from its own thread.

    Args:
        path: the file.
        hot_keys: gives what to write.
        num_lookups: grows with every look-up; while it does not change, nothing is written.
    """

    def __init__(self, path: Path, hot_keys: Callable[[], HotKeys], num_lookups: Callable[[], int]) -> None:
        self._path = path
        self._hot_keys = hot_keys
        self._num_lookups = num_lookups
        self._written_at = num_lookups()
        self._failure = ""
        self._writing = threading.Lock()
        failure = "hot keys could not be saved for the next start"
        self._writes = RepeatedCall("hotrow-hot-keys", self.write, INTERVAL_S, max_load=_MAX_LOAD, failure=failure)

    def write(self) -> None:
        """Write now, if there is news. A folder that cannot be written is logged, once per reason."""
        with self._writing:
            num_lookups = self._num_lookups()
            if num_lookups == self._written_at:
                return
            try:
                write_hot_keys(self._path, self._hot_keys())
                self._written_at = num_lookups
            except (OSError, UnavailableError) as error:  # the disk, or the GPU whose cache it is
                if str(error) != self._failure:
                    self._failure = str(error)
                    _log.warning("hot keys could not be saved for the next start: %s", error)

    def close(self) -> None:
        """Write any news, and end the thread. May be called more than once."""
        if not self._writes.closing.is_set():
            self._writes.close()
            self.write()
