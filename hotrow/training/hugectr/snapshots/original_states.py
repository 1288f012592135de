"""Optimizer states of tables as HugeCTR writes them, since release 3.1.

A file has a block for each state, and a block has a part for each GPU: the rows that a table may have there. Row i of
a part belongs to the i-th key of that GPU in the file `key` of the same snapshot. The rows behind them are unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.arguments.enums import Embedding_t
from hotrow.training.hugectr.arguments.parameters import Solver, SparseEmbedding
from inference_session.errors import ModelFormatError, UnsupportedModelError

WAY_OUT = "Or leave load_sparse_optimizer_states out: the rows train on, and their states begin anew"


@dataclass(frozen=True)
class OriginalLayout:
    """The settings that the layout of a file follows from."""

    num_gpus: int
    rows_per_gpu: int
    """The rows that the table may have on each GPU."""
    dtype: np.dtype[np.floating]
    """Of the states."""
    is_divided_by_key: bool
    """Whether a key is on the GPU `key % num_gpus`."""

    def read(
        self, path: Path, keys: NDArray[np.int64], num_states: int, embedding_dim: int
    ) -> Iterator[NDArray[np.float32]]:
        """The states in the order of the file, each [keys, embedding_dim].

        Args:
            keys: those of the snapshot's file `key`, in its order.

        Raises:
            ModelFormatError: the file is not of these settings or keys.
            UnsupportedModelError: the GPU of a key cannot be known.
        """
        if self.num_gpus > 1 and not self.is_divided_by_key:
            raise UnsupportedModelError(
                f"{path}: HugeCTR wrote it on {self.num_gpus} GPUs for a Localized embedding, whose rows are on GPUs "
                f"by slot; only that of one GPU can be read. {WAY_OUT}"
            )
        shape = (num_states, self.num_gpus * self.rows_per_gpu, embedding_dim)
        self._check_size(path, shape)
        places = self._places(path, keys)
        blocks = np.memmap(path, self.dtype, "r", shape=shape) if all(shape) else np.empty(shape, self.dtype)
        return (block[places].astype(np.float32) for block in blocks)

    def _check_size(self, path: Path, shape: Sequence[int]) -> None:
        expected = int(np.prod(shape)) * self.dtype.itemsize
        if path.stat().st_size != expected:
            raise ModelFormatError(
                f"{path}: {path.stat().st_size} bytes, expected {expected}: {shape[0]} states of {self.rows_per_gpu} "
                f"rows on each of {self.num_gpus} GPUs, {shape[2]} {self.dtype.name} each. vvgpu, the optimizer, "
                "use_mixed_precision, and workspace_size_per_gpu_in_mb or slot_size_array must be those of the run "
                f"that HugeCTR wrote it in. {WAY_OUT}"
            )

    def _places(self, path: Path, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the rows of keys are in a block."""
        gpus = (keys.view(np.uint64) % np.uint64(self.num_gpus)).astype(np.int64)
        counts = np.bincount(gpus, minlength=self.num_gpus)
        if (np.diff(gpus) < 0).any() or counts.max(initial=0) > self.rows_per_gpu:
            raise ModelFormatError(
                f"{path}: the keys of the sparse weights are not as HugeCTR writes them on {self.num_gpus} GPUs with "
                f"{self.rows_per_gpu} rows each; load the sparse weights of the same snapshot first, with its vvgpu. "
                f"{WAY_OUT}"
            )
        begins = np.cumsum(counts) - counts
        return np.arange(len(keys)) - begins[gpus] + gpus * self.rows_per_gpu


def layout_of(embedding: SparseEmbedding, solver: Solver) -> OriginalLayout:
    """The layout of the states of an embedding layer, trained by HugeCTR with these settings."""
    is_by_key = embedding.embedding_type is Embedding_t.DistributedSlotSparseEmbeddingHash
    rows = (embedding.workspace_size_per_gpu_in_mb << 20) // (4 * embedding.embedding_vec_size)
    if embedding.slot_size_array and not is_by_key:
        rows = sum(embedding.slot_size_array)
    dtype: np.dtype[np.floating] = np.dtype("<f2" if solver.use_mixed_precision else "<f4")
    return OriginalLayout(solver.num_gpus, rows, dtype, is_by_key)
