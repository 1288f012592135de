"""Parameters that make HugeCTR faster on its devices. Here they change nothing, except where one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.training.hugectr.enums import Alignment_t
from inference_session.errors import UnsupportedModelError


@dataclass
class AsyncParam:
    """How RawAsync reads ahead: without effect. Batches come in the order of the file, also with `shuffle`."""

    num_threads: int
    num_batches_per_thread: int
    max_num_requests_per_thread: int = 0
    io_depth: int = 0
    io_alignment: int = 0
    shuffle: bool = False
    aligned_type: Alignment_t = Alignment_t.Non
    multi_hot_reader: bool = False
    is_dense_float: bool = False

    def __post_init__(self) -> None:
        for name in ("multi_hot_reader", "is_dense_float"):
            if getattr(self, name):
                raise UnsupportedModelError(
                    f"AsyncParam: {name} is not supported: write the data as Parquet, or in the "
                    "format DataReaderType_t.Raw; embedding collections read both"
                )


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
