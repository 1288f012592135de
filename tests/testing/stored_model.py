"""The small model with its rows in stores."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session import InferenceSession
from inference_session.model_spec import TABLES_FOLDER
from inference_session.parameter_server.create import create_store
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.table_push import TablePush
from inference_session.version_directory.session_file import read_spec
from tests.testing import small_model
from tests.testing.servers import PATIENCE_MS

DIMS = {table.folder: table.embedding_dim for table in small_model.TABLES}
HASHED_DEFAULT = [0.5, -0.5]


def push(directory: Path, url: str) -> None:
    """Fill a store with the rows of a version of any model."""
    tables = read_spec(directory).tables
    dims = {table.folder: table.embedding_dim for table in tables}
    namespace = Namespace.of(directory, shared=False)
    with create_store(url, namespace, dims, writable=True, timeout_ms=PATIENCE_MS) as store:
        for table in tables:
            TablePush(directory, table, store).run()


def write_stored(root: Path) -> tuple[Path, small_model.Arrays]:
    """Write the small model, push its rows to a RocksDB, whose URL `url_of` gives, and remove their files.

    Returns the version directory, and the tables.
    """
    directory = root / "repository" / "small" / "1"
    tables = small_model.write(directory)
    push(directory, url_of(directory))
    shutil.rmtree(directory / TABLES_FOLDER)
    return directory, tables


def url_of(directory: Path) -> str:
    """The URL of a RocksDB next to the repository of a version."""
    return f"rocksdb://{directory.parent.parent.parent}/db"


def assert_answers(answer: object, expected: small_model.Arrays) -> None:
    assert isinstance(answer, dict), answer
    for name, array in answer.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


def assert_updates_are_read_back(
    session: InferenceSession, read: Callable[[list[int]], Iterable[NDArray[np.float32]]], *, num_updates: int
) -> None:
    """While threads look rows up, each update of a row is found right after it; no row is answered half.

    Args:
        session: of the small model, over a store that takes updates.
        read: gives the rows of keys of `user.weight` in each place that they must be found in.
        num_updates: of one row each.
    """
    ended = threading.Event()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not ended.is_set():
            vectors = session.lookup("user.weight", rng.integers(-50, 50, 30))
            assert (vectors[:, 1:] == vectors[:, :1]).all()
            ended.wait(0.002)  # else these threads hold the interpreter, and each update waits for all of them

    session.update("user.weight", np.arange(50), np.full((50, 4), -1, np.float32))
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, seed) for seed in range(4)]
        try:
            for number in range(num_updates):
                session.update("user.weight", [number % 50], np.full((1, 4), number, np.float32))
                for found in read([number % 50, number % 50 - 50]):
                    assert (found == number).all()
        finally:
            ended.set()
        for each in asking:
            each.result()
