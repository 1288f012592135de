"""Which files a store was filled from, so that no version is answered with the rows of another one.

Rows in a store belong to a version number. Where a version is removed and its number given to other files, the store
still has rows of the old ones, and would answer them before the new files. The table's note tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from itertools import islice

from inference_session.errors import ConfigurationError, HotrowError, StoreError
from inference_session.model_spec import TABLES_FOLDER, TableSpec
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.platform.json_records import own_fields
from inference_session.version_directory import manifest
from inference_session.version_directory.version import VersionDirectory


def source_of(files: Sequence[manifest.FileEntry], spec: TableSpec) -> str:
    """A short name for the contents of a table's files, computed from the checksums in a version's manifest."""
    folder = f"{TABLES_FOLDER}/{spec.folder}/"
    entries = sorted(f"{file.path} {file.sha256}" for file in files if str(file.path).startswith(folder))
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]


def push_note(source: str, num_rows: int, num_all: int) -> str:
    """The note of a table of which a push has written this many of all rows."""
    return json.dumps({"source": source, "rows": num_rows, "of": num_all})


class TableSources:
    """The files of a version, against which stores are checked that may hold rows of others."""

    def __init__(self, version: VersionDirectory) -> None:
        """`version`: has table files."""
        files = manifest.read_manifest(version.path)
        self._path = version.path
        self._sources = {table: source_of(files, table) for table in version.spec.tables}

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables, by their folders."""
        return tuple(table.folder for table in self._sources)

    def refuse_others(self, store: EmbeddingStore, *, volatile: bool) -> None:
        """Refuse a store that was filled from other files.

        A volatile store without a note gets one, as rows of these files will be promoted to it.

        Raises:
            ConfigurationError: names the store and the table.
            UnavailableError: it cannot be determined at present.
        """
        for table, source in self._sources.items():
            try:
                noted = noted_source(store, table)
            except StoreError:  # it keeps no notes
                return
            if noted is None and volatile:
                with contextlib.suppress(HotrowError):  # then it takes no rows either, and is asked again
                    store.set_note(table.folder, push_note(source, 0, table.num_rows))
            if noted not in (None, source):
                raise ConfigurationError(
                    f"{store!r} holds rows of table {table.name!r} that came from other files than those of "
                    f"{self._path}, for a version of the same number; publish these under a new number"
                )

    def are_noted(self, store: EmbeddingStore) -> bool:
        """Whether the first table has its note, or the store keeps none: all notes vanish, or change, at once."""
        with contextlib.suppress(StoreError):
            return all(noted_source(store, table) == source for table, source in islice(self._sources.items(), 1))
        return True


def noted_source(store: EmbeddingStore, table: TableSpec) -> str | None:
    """The files that a table was filled from; None where that is not known."""
    noted = own_fields(store.note(table.folder)).get("source")
    return noted if isinstance(noted, str) else None
