"""HugeCTR's embedding training cache, with whole tables in memory: keysets and parameter servers have no effect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.arguments.tuning import TrainingCacheParams
from hotrow.training.hugectr.snapshots.snapshot import save_table
from hotrow.training.hugectr.trainer.embedding import EmbeddingTable
from hotrow.training.hugectr.trainer.processes import Processes
from inference_session.errors import ConfigurationError


class Oversubscriber:
    """What keysets are given to."""

    def update(self, keyset_file: str | Sequence[str]) -> None:
        """Before training on the keys of a keyset: without effect."""


class TrainingCache(Oversubscriber):
    """The tables of a model, and the folders that they begin from and are saved to."""

    def __init__(self, params: TrainingCacheParams, tables: Sequence[EmbeddingTable]) -> None:
        """ConfigurationError: the number of folders is not that of the tables."""
        if len(params.sparse_models) != len(tables):
            raise ConfigurationError(
                f"CreateETC: {len(params.sparse_models)} sparse_models for {len(tables)} tables; one each is required"
            )
        self._tables = tables
        self._folders = params.sparse_models
        self.existing = [
            (table, str(folder))
            for table, folder in zip(tables, self._folders, strict=True)
            if folder.is_dir() and not params.is_from_scratch
        ]
        """Tables that begin from a folder."""
        for table in tables:
            table.track_changes()

    def changed_rows(self) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """By table, keys [n] and vectors [n, embedding_dim] that changed since the last call, on this process."""
        return [table.take_changes() for table in self._tables]

    def save(self, processes: Processes) -> None:
        """Write each table to its folder; all processes call it."""
        for table, folder in zip(self._tables, self._folders, strict=True):
            save_table(table, processes, folder)
