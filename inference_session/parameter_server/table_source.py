"""Which files a store was filled from, so that no version is answered with the rows of another one.

Rows in a store belong to a version number. Where a version is removed and its number given to other files, the store
still has rows of the old ones, and would answer them before the new files. The table's note tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from inference_session.errors import ConfigurationError, HotrowError
from inference_session.model_spec import TABLES_FOLDER, TableSpec
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.tier import Tier
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


def refuse_rows_of_other_files(version: VersionDirectory, tiers: Sequence[Tier]) -> None:
    """Refuse stores that were filled from other files than those of this version, which has table files.

    A volatile store without a note gets one, as rows of these files will be promoted to it.

    Raises:
        ConfigurationError: names the store and the table.
    """
    files = manifest.read_manifest(version.path)
    sources = {table: source_of(files, table) for table in version.spec.tables}
    for tier in tiers:
        for table, source in sources.items() if tier.failure is None else ():
            try:
                noted = _noted_source(tier.store, table)
                if noted is None and tier.volatile:
                    tier.store.set_note(table.folder, push_note(source, 0, table.num_rows))
            except HotrowError:  # it is down now, or keeps no notes
                break
            if noted not in (None, source):
                raise ConfigurationError(
                    f"{tier.store!r} holds rows of table {table.name!r} that came from other files than those of "
                    f"{version.path}, for a version of the same number; publish these under a new number"
                )


def _noted_source(store: EmbeddingStore, table: TableSpec) -> str | None:
    """The files that a table was filled from; None where that is not known."""
    try:
        noted = json.loads(store.note(table.folder) or "{}").get("source")
    except (ValueError, AttributeError):  # not our note
        return None
    return noted if isinstance(noted, str) else None
