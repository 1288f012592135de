"""`python -m inference_session.execution.all_kernels`: compile the kernels that serving may need,
to be included in an image.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from inference_session.embedding_cache.cpu import CpuEmbeddingCache, allocate
from inference_session.kernels.cpu import cache, keys, lookup, missing
from inference_session.kernels.cpu.requests import bag_staging, bags, capsules, dlpack, gathering, named_arrays, staging
from inference_session.model_spec import ModelSpec, TableSpec
from inference_session.parameter_server.redis import layout as redis_layout
from inference_session.parameter_server.redis import replies as redis_replies
from inference_session.parameter_server.server import ParameterServer
from inference_session.platform.pacing import without_collections
from inference_session.rows.base import look_up_keys
from inference_session.rows.files import changing_rows
from inference_session.rows.stored import StoredRows
from inference_session.stats import SessionStats
from inference_session.tables.table_file import TableFile, write_table

_TABLE = TableSpec("table", "table", num_rows=2, embedding_dim=1)


def compile_all() -> None:
    """Look-ups, requests, answers, caches, updates, Redis, files, and HugeCTR's bags; compiled kernels are only loaded.

    Look-ups take about as long as all others: a process each.
    """
    spawning = multiprocessing.get_context("spawn")
    with without_collections(), ProcessPoolExecutor(1, spawning, initializer=gc.disable) as second:
        lookups = second.submit(lookup.compile_kernels)
        _compile_others()
        lookups.result()
    _use_a_cache()
    with tempfile.TemporaryDirectory(prefix="hotrow-kernels-") as folder:
        _use_a_table(Path(folder))


def _compile_others() -> None:
    bags.compile_kernels()
    staging.compile_kernels()
    bag_staging.compile_kernels()
    gathering.compile_kernels()
    keys.compile_kernels()
    missing.compile_kernels(gpu=True)
    dlpack.compile_kernels()
    capsules.compile_kernels()
    named_arrays.compile_kernels()
    SessionStats(ModelSpec((), (), (), ()))
    redis_layout.compile_kernels()
    redis_replies.compile_kernels()
    cache.compile_kernels(allocate(num_rows=1, row_bytes=4))


def _use_a_cache() -> None:
    embedding_cache = CpuEmbeddingCache({"table": 1}, cache_bytes=1 << 20)
    embedding_cache.insert("table", np.arange(2), np.zeros((2, 1), np.float32))
    embedding_cache.update("table", np.arange(1), np.zeros((1, 1), np.float32))
    embedding_cache.erase("table", np.arange(1))
    StoredRows([_TABLE], [embedding_cache], ParameterServer([])).close()


def _use_a_table(folder: Path) -> None:
    """A table is written, opened, changed and read, as an import, a session and an update stream do it."""
    keys, vectors = np.arange(2), np.zeros((2, 1), np.float32)
    write_table(folder, [vectors], keys=[keys])
    rows = changing_rows([TableFile.open(folder, _TABLE)])
    rows.writer.update(_TABLE.folder, keys, vectors)
    rows.writer.erase(_TABLE.folder, keys)
    look_up_keys(rows.readers[0], 0, keys, np.empty_like(vectors))
    rows.close()


if __name__ == "__main__":
    compile_all()
