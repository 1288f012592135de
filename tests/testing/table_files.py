"""Table files as a tier, made from arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.model_spec import TABLES_FOLDER, ModelSpec, TableSpec
from inference_session.parameter_server.base import EmbeddingStore
from inference_session.parameter_server.file_store import TableFileStore
from inference_session.tables.table_file import write_table
from inference_session.version_directory import manifest
from inference_session.version_directory.version import VersionDirectory


def table_files(
    folder: Path,
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float32]]],
    store: EmbeddingStore,
    asks_for_erased: Callable[[], bool] = bool,
) -> TableFileStore:
    """The tables, keys and vectors by name, written to a folder; `store` remembers which rows were erased."""
    for table, (keys, vectors) in rows.items():
        write_table(folder / TABLES_FOLDER / table, [vectors], keys=[keys])
    specs = tuple(TableSpec(table, table, *vectors.shape) for table, (_, vectors) in rows.items())
    manifest.write_manifest(folder)
    version = VersionDirectory(folder, ModelSpec((), (), specs, ()))
    return TableFileStore(version, store, asks_for_erased=asks_for_erased)
