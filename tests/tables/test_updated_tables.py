"""Rows of files that change while a GPU looks them up: it answers as the processor does, whatever was updated.

Where there is one GPU, the devices share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.device.host import HOST
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.kernels.records import Lookup, PoolingCode
from inference_session.rows.files import FileRows, changing_rows
from inference_session.rows.updated import UpdatedRowWriter
from inference_session.tables.table_file import TableFile
from tests.testing.full_device import full_device
from tests.testing.tables_of_all_kinds import answers, devices_of, some_keys

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]
NUM_ROUNDS = 12


class HostAnswers:
    """The processor's rows, in the place of a device's tables."""

    device = HOST

    def __init__(self, rows: FileRows) -> None:
        self.look_up: Callable[[Lookup], None] = rows.readers[0].look_up

    def prepare(self, _: NDArray[np.void]) -> None:
        """Nothing."""


def random_change(file: TableFile, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Some of the table's rows, now and then many, and keys that it does not have; some of them twice."""
    count = int(rng.choice([1, 3, 50, 700]))
    keys = some_keys(file, count, rng)
    if file.spec.keys == "row_number":
        keys = np.abs(keys)
    keys = np.where(rng.random(count) < 0.2, rng.integers(10**6, 10**6 + 2000, count), keys)
    return keys, rng.standard_normal((count, file.spec.embedding_dim), np.float32)


def open_both(files: list[TableFile], num_devices: int, shard: str) -> tuple[FileRows, UpdatedRowWriter, list[Any]]:
    """The processor's rows, a writer of the devices' rows, and the devices' tables."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    tables = open_cuda_tables(files, devices_of(num_devices), shard=shard, rows_change=True)  # type: ignore[arg-type]
    return changing_rows(files), UpdatedRowWriter(files, tables), [*tables]


@pytest.mark.parametrize(("num_devices", "shard"), [(1, "none"), (2, "none"), (2, "rows"), (3, "rows")])
def test_each_device_answers_as_the_processor(files: list[TableFile], num_devices: int, shard: str) -> None:
    """Vectors and unknown keys after each of many updates and deletions, for plain look-ups and pooled ones, and the
    same of look-ups that were prepared before.
    """
    rng = np.random.default_rng(num_devices)
    host, writer, tables = open_both(files, num_devices, shard)
    for number in range(NUM_ROUNDS):
        file = files[int(rng.integers(len(files)))]
        keys, vectors = random_change(file, rng)
        for each in (host.writer, writer):
            each.update(file.spec.folder, keys, vectors)
            if number % 3 == 2:
                each.erase(file.spec.folder, keys[::2])
        pooling = PoolingCode(number % len(PoolingCode))
        asked = [np.concatenate([some_keys(one, 200, rng), keys[:40], keys[-40:]]) for one in files]
        asked = [each[: len(each) // 4 * 4] for each in asked]
        expected, num_unknown = answers(HostAnswers(host), files, asked, pooling)  # type: ignore[arg-type]
        for each in tables:
            found, counted = answers(each, files, asked, pooling)
            assert counted.tolist() == num_unknown.tolist()
            for one, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)
    for each in tables:
        each.close()
        with pytest.raises(SessionClosedError):
            each.put(0, None, None)


def test_many_changed_rows_find_room(files: list[TableFile]) -> None:
    """As many as their memory must be replaced for several times; all are answered, and counted once."""
    _, writer, tables = open_both(files, 2, "rows")
    rows = [FileRows(files, [each], writer) for each in tables]
    folder, dim = files[5].spec.folder, files[5].spec.embedding_dim
    before = rows[0].stats().placement
    for begin in range(0, 60_000, 7_000):
        keys = np.arange(begin, begin + 7_000)
        writer.update(folder, keys, np.repeat(keys.astype(np.float32)[:, None], dim, axis=1))
    asked = [np.arange(0, 63_000, 9) if file.spec.folder == folder else np.zeros(4, np.int64) for file in files]
    for each in rows:
        found, _ = answers(each.readers[0], files, asked, PoolingCode.NONE)
        assert (found[5] == asked[5][:, None]).all()
        stats = each.stats()
        assert stats.updated is not None
        assert stats.updated[folder].rows == 63_000
        assert stats.placement is not None
        assert before is not None
        assert stats.placement.bytes > before.bytes + 63_000 * 4 * dim
    for tables_of_one in tables:
        tables_of_one.close()


def test_changed_rows_that_find_no_memory_are_refused(files: list[TableFile]) -> None:
    """The error says how much there must be; the device answers as before, and takes the rows once it has memory."""
    _, writer, tables = open_both(files, 1, "none")
    folder, dim = files[5].spec.folder, files[5].spec.embedding_dim
    asked = [np.arange(40_000) if file.spec.folder == folder else np.zeros(4, np.int64) for file in files]
    writer.update(folder, asked[5][:8], np.ones((8, dim), np.float32))
    with full_device(), pytest.raises(UnavailableError, match=r"cuda:0 has too little memory for \d+ changed rows"):
        writer.update(folder, asked[5], np.full((40_000, dim), 2, np.float32))
    found, _ = answers(tables[0], files, asked, PoolingCode.NONE)
    assert np.isin(found[5][:8], [1, 2]).all()
    writer.update(folder, asked[5][:8], np.full((8, dim), 3, np.float32))
    found, _ = answers(tables[0], files, asked, PoolingCode.NONE)
    assert (found[5][:8] == 3).all()
    tables[0].close()
