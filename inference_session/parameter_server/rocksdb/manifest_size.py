"""How long a database's MANIFEST has been. Where one was cut between two of its records, RocksDB itself opens an older
database, without a word. So the writer notes the size in a file next to it, and whoever opens the database compares.

A MANIFEST only grows. Each opening by a writer begins another one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from inference_session.errors import StoreError

CURRENT_FILE = "CURRENT"
"""A file that every RocksDB has: it names the MANIFEST."""
IDENTITY_FILE = "IDENTITY"
"""Written once, when a database is made."""
SIZE_FILE = "hotrow_manifest_size"


def note_manifest_size(path: Path) -> None:
    """Note the size of a database's MANIFEST, if it has grown. Nothing where the disk does not take that."""
    with suppress(OSError):
        found, file = _found(path), path / SIZE_FILE
        if not file.exists() or file.read_bytes() != found:
            file.write_bytes(found)  # of a half of it, nothing is refused


def refuse_cut_manifest(path: Path) -> None:
    """StoreError if a database's MANIFEST is shorter than it has been; nothing where none of ours has written it."""
    with suppress(OSError, ValueError):
        noted = (path / SIZE_FILE).read_bytes()  # before the MANIFEST, which a writer may lengthen
        *names, size = noted.split()
        *found_names, found_size = _found(path).split()
        if names == found_names and int(found_size) < int(size):
            raise StoreError(
                f"the RocksDB at {str(path)!r}: its {names[-1].decode()} has {int(found_size)} bytes and had"
                f" {int(size)}, so rows that were written later are missing; it was cut, or copied while it was written"
            )


def _found(path: Path) -> bytes:
    """What identifies the database, the name of its MANIFEST, and its size."""
    identity, manifest = ((path / name).read_bytes().strip() for name in (IDENTITY_FILE, CURRENT_FILE))
    return b"%b %b %d" % (identity, manifest, (path / manifest.decode()).stat().st_size)
