"""The memory that parts of a served version take, against what they say of themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.model_spec import TableSpec
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.rocksdb.store import RocksDbStore
from inference_session.sizing.memory import rocksdb_bytes

NUM_ROWS = 20_000


@pytest.mark.parametrize("embedding_dim", [2, 16, 64, 128, 512])
def test_filters_and_indexes_of_a_rocksdb(embedding_dim: int, tmp_path: Path) -> None:
    """Within a tenth, and some thousand bytes of an open file, of what RocksDB itself counts."""
    table = TableSpec("t", "t", NUM_ROWS, embedding_dim)
    keys = np.random.default_rng(0).integers(0, 1 << 60, NUM_ROWS)
    with RocksDbStore(tmp_path, Namespace("m", "1"), {"t": embedding_dim}, writable=True) as store:
        store.insert("t", keys, np.ones((NUM_ROWS, embedding_dim), np.float32))
    with RocksDbStore(tmp_path, Namespace("m", "1"), {"t": embedding_dim}) as store:
        counted = int(store.family("t").property_value("rocksdb.estimate-table-readers-mem"))
    assert counted == pytest.approx(rocksdb_bytes(table), rel=0.1, abs=4000)
