"""Files whose checksums were verified before, so that loading a new version reads only its new files.

A file is recognized by its device, inode, size and both of its times. The time of modification can be set back, as
`cp -p` and `rsync --times` do; the time of change (ctime) cannot. A hard link changes the ctime too, so a publication
notes the files that it links and reads (publishing.py). After any other change of the ctime the file is read again.

Kept as a state file (state_file.py), JSON, the files verified last at its end.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from inference_session.platform.json_records import own_fields
from inference_session.platform.state_file import read_state, write_state

MAX_FILES = 4096
"""Files that are remembered."""
_SETTLED_NS = 2_000_000_000
"""Age from which on a further change of a file is bound to change its times too."""

FileState = tuple[int, ...]
"""Device, inode, size and time of modification; `verified_state` adds the time of change. Empty: there is no file."""


def file_state(path: Path) -> FileState:
    """Values that identify a file and its state: a write changes them, a hard link does not."""
    return verified_state(path)[:-1]


def verified_state(path: Path) -> FileState:
    """Values that show that the file was not written to since, even if the time of modification was set back."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


class VerifiedFiles:
    """Remembers the checksums of files over the life of a process. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        """`path`: the file that keeps them; nothing is known where it does not exist, or is damaged."""
        self._path = path
        self._checksums: dict[str, str] = own_fields(read_state(self._path))
        self._has_changed = False

    @property
    def exists(self) -> bool:
        """Whether a process has kept anything here."""
        return self._path.exists()

    def holds(self, state: FileState, checksum: str) -> bool:
        """Whether a file in that `verified_state` has been found to have that checksum."""
        return self._checksums.get(str(state)) == checksum

    def add(self, state: FileState, checksum: str) -> None:
        """Remember what was just read, unless the file is so young that a later change might not show."""
        if state and time.time_ns() - max(state[-2:]) > _SETTLED_NS:
            self._checksums[str(state)] = checksum
            self._has_changed = True

    def save(self) -> None:
        """Save it for the next process; where that fails, files are read again."""
        kept = dict(list(self._checksums.items())[-MAX_FILES:])
        if self._has_changed:
            with suppress(OSError):
                write_state(self._path, json.dumps(kept).encode())
