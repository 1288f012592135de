"""The rows of a model as they are served, back into HugeCTR's sparse folders.

<target>/<table>/key           int64, little endian
<target>/<table>/emb_vector    float32, little endian, [rows, embedding_dim], in the order of `key`

Each key occurs once, with the row that a look-up answers: from the stores, and from the table files where the stores
have no row. Keys that look-ups answer with a default vector are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inference_session.errors import ConfigurationError
from inference_session.model_source import Copy, create_source, is_url
from inference_session.model_source.create import split_place
from inference_session.model_source.fetch import folder_for_links
from inference_session.model_spec import KEY_FILE, VECTOR_FILE, ModelSpec
from inference_session.platform.drafts import draft_folder
from inference_session.platform.large_pages import open_for_writing
from inference_session.platform.progress import Progress
from inference_session.rows.base import Rows
from inference_session.tables.base import RowBatch

_ROWS_PER_CHUNK = 1 << 16


@dataclass(frozen=True)
class DumpReport:
    """What was written."""

    num_rows: dict[str, int]
    """By table folder."""


def dump(rows: Rows, spec: ModelSpec, target: str | Path, progress: Progress | None = None) -> DumpReport:
    """Write all tables into a new folder, a path or an `hdfs://` URL, which appears when it is complete.

    This process writes no row from the first row read to the last; requests are answered meanwhile.
    For HDFS the rows are written to the cache folder first.

    Args:
        progress: gets the number of rows read since the last call; those that come from several tiers count each time.

    Raises:
        ConfigurationError: the target exists.
        UnavailableError: a tier is down, or HDFS does not answer.
        StoreError, OSError: a tier cannot be read, or the target not be written.
    """
    _refuse_existing(target)
    with _written_locally(target) as folder, rows.writer.frozen():
        return DumpReport(
            {
                table.folder: _write_table(
                    rows.scan(table.folder), folder / table.folder, table.embedding_dim, progress
                )
                for table in spec.tables
            }
        )


def _refuse_existing(target: str | Path) -> None:
    folder, name = split_place(target)
    with create_source(folder) as place:
        if place.stat(name) is not None:
            raise ConfigurationError(f"{place.name_of(name)}: already exists; choose another target")


@contextmanager
def _written_locally(target: str | Path) -> Iterator[Path]:
    """Yield a folder of this machine to write to; its final contents become the target."""
    if not is_url(target):
        with draft_folder(Path(target).absolute()) as draft:
            yield draft
        return
    with folder_for_links("dump") as folder:
        yield folder
        with Copy(folder, target) as copy:
            copy.run()


def _write_table(batches: Iterator[RowBatch], folder: Path, embedding_dim: int, progress: Progress | None) -> int:
    folder.mkdir(parents=True)
    with open_for_writing(folder / KEY_FILE) as key_file, open_for_writing(folder / VECTOR_FILE) as vector_file:
        for keys, vectors in batches:
            key_file.write(np.ascontiguousarray(keys, "<i8").data)
            vector_file.write(np.ascontiguousarray(vectors, "<f4").data)
            if progress is not None:
                progress(len(keys))
    return _remove_duplicates(folder, embedding_dim)


def _remove_duplicates(folder: Path, embedding_dim: int) -> int:
    """Keep the first row of each key; returns how many there are. A scan may give a row twice, though rarely does."""
    keys = np.fromfile(folder / KEY_FILE, "<i8")
    unique, first = np.unique(keys, return_index=True)
    if len(unique) == len(keys):
        return len(keys)
    first.sort()
    vectors = np.memmap(folder / VECTOR_FILE, "<f4", "r+", shape=(len(keys), embedding_dim))
    for begin in range(0, len(first), _ROWS_PER_CHUNK):
        part = first[begin : begin + _ROWS_PER_CHUNK]
        vectors[begin : begin + len(part)] = vectors[part]  # moves rows to the front only
    vectors.flush()
    with (folder / VECTOR_FILE).open("r+b") as file:
        file.truncate(4 * embedding_dim * len(first))
    keys[first].tofile(folder / KEY_FILE)
    return len(first)
