"""Parameters that make HugeCTR faster. Here they change nothing, but for what AsyncParam says of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.training.hugectr.enums import Alignment_t


@dataclass
class AsyncParam:
    """How RawAsync reads. Batches come in the order of the file, also with `shuffle`.

    Only the last two have an effect.
    """

    num_threads: int
    num_batches_per_thread: int
    max_num_requests_per_thread: int = 0
    io_depth: int = 0
    io_alignment: int = 0
    shuffle: bool = False
    aligned_type: Alignment_t = Alignment_t.Non
    multi_hot_reader: bool = False
    """Each slot has as many keys as `nnz_per_slot` says, of 8 bytes with `i64_input_key`, and labels are integers."""
    is_dense_float: bool = False
    """With `multi_hot_reader`: dense features are float32, else integers, which are read as log(feature + 1)."""


class HybridEmbeddingParam:
    """Where HugeCTR keeps the frequent rows of a HybridSparseEmbedding: without effect."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        """Any arguments."""


class DenseLayerComputeConfig:
    """How HugeCTR computes gradients of a layer: without effect."""

    def __init__(self, *_values: Any, **_named: Any) -> None:
        """Any arguments."""


DenseLayerSwitchs = DenseLayerComputeConfig
"""The name in releases 3.7 and 3.8."""
