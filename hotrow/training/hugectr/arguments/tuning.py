"""Parameters of how HugeCTR uses its devices and memory, most of which change nothing here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow.training.hugectr.arguments.enums import Alignment_t
from inference_session.errors import UnsupportedModelError


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


DenseLayerComputeConfig = DenseLayerSwitchs = MemoryCacheConfig = HybridEmbeddingParam
"""How HugeCTR computes gradients of a layer (the second in releases 3.7 and 3.8), and `CreateHMemCache`: the same."""


class TrainingCacheParams:
    """`CreateETC`, and `CreateMOS` of release 3.2."""

    def __init__(
        self,
        ps_types: Sequence[Any] = (),
        sparse_models: Sequence[str] = (),
        local_paths: Sequence[str] = (),
        hmem_cache_configs: Sequence[Any] = (),
        *,
        train_from_scratch: bool = False,
        use_host_memory_ps: bool = True,
        trained_sparse_models: Sequence[str] = (),
        dest_sparse_models: Sequence[str] = (),
    ) -> None:
        """Only the folders of the tables have an effect: `sparse_models`, or the last two names of release 3.2.

        Raises:
            UnsupportedModelError: a folder is not on this machine.
        """
        for place in (*sparse_models, *trained_sparse_models, *dest_sparse_models):
            if "://" in place:
                raise UnsupportedModelError(
                    f"CreateETC: sparse_models {place!r} is not supported; name folders of this machine. Snapshots are "
                    "written to HDFS where DataSourceParams says so"
                )
        self.sparse_models = [Path(place) for place in (sparse_models or trained_sparse_models or dest_sparse_models)]
        self.is_from_scratch = train_from_scratch
