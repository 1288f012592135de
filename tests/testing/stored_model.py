"""The small model with its rows in stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.store_url import create_store
from inference_session.parameter_server.table_push import TablePush
from tests.testing import small_model
from tests.testing.servers import PATIENCE_MS

DIMS = {table.folder: table.embedding_dim for table in small_model.TABLES}
HASHED_DEFAULT = [0.5, -0.5]


def push(directory: Path, url: str) -> None:
    with create_store(
        url, Namespace(directory.parent.name, directory.name), DIMS, writable=True, timeout_ms=PATIENCE_MS
    ) as store:
        for table in small_model.TABLES:
            TablePush(directory, table, store).run()


def url_of(directory: Path) -> str:
    return f"rocksdb://{directory.parent.parent.parent}/db"


def assert_answers(answer: object, expected: small_model.Arrays) -> None:
    assert isinstance(answer, dict), answer
    for name, array in answer.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)
