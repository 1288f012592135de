"""Small files that a serving process leaves for the next one: written whole or not at all, and checked when read.

A file is a line that names the format, the SHA-256 of the content, and the content. A damaged one counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from pathlib import Path

from inference_session.platform.small_files import read_regular_file, write_whole
from inference_session.platform.user_cache import make_private

_MAGIC = b"hotrow state 1\n"
_DIGEST_BYTES = 32
_ABANDONED_S = 3600
"""Age at which a draft is known to be that of a process that was killed."""

_log = logging.getLogger(__name__)


def write_state(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk, then rename it into place; OSError with its name where that fails."""
    try:
        make_private(path.parent)
        _write(path, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, content: bytes) -> None:
    for draft in path.parent.glob(f".tmp-*-{path.name}"):
        with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
            if time.time() - draft.stat().st_mtime > _ABANDONED_S:
                draft.unlink()
    # Keys may identify people.
    write_whole(path, _MAGIC, hashlib.sha256(content).digest(), content, mode=0o600)


def read_state(path: Path) -> bytes | None:
    """The content; None where there is no such file, or one that is damaged or cannot be read, which is logged."""
    try:
        data = read_regular_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("ignoring %s: %s", path, error.strerror)
        return None
    begin = len(_MAGIC) + _DIGEST_BYTES
    content = data[begin:]
    if data[:begin] != _MAGIC + hashlib.sha256(content).digest():
        _log.warning("%s is ignored: it is damaged, or not a state file of this version of hotrow", path)
        return None
    return content
