"""Tables whose rows are divided among GPUs: each GPU looks up all rows, as the processor does.

Where there is one GPU, shards lie on it side by side: the same kernels run, but read no other GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.errors import ConfigurationError
from inference_session.kernels.records import PoolingCode
from inference_session.model_spec import TableSpec
from inference_session.tables.host_tables import HostTables
from inference_session.tables.table_file import TableFile, write_table
from tests.testing.servers import wait_until
from tests.testing.tables_of_all_kinds import answers, devices_of, some_keys

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]


@pytest.fixture(scope="module", params=[1, 2, 3, 8])
def tables(request: pytest.FixtureRequest, files: list[TableFile]) -> Iterator[list[Any]]:
    """The tables as each of several devices looks them up."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    opened = open_cuda_tables(files, devices_of(request.param), shard="rows")
    yield opened
    for each in opened:
        each.close()


@pytest.mark.parametrize("pooling", list(PoolingCode))
def test_each_gpu_looks_up_all_rows(tables: list[Any], files: list[TableFile], pooling: PoolingCode) -> None:
    """The vectors, default vectors and counts of the processor, for few keys and for many, pooled or not."""
    host, rng = HostTables(files, num_threads=1), np.random.default_rng(pooling)
    for count in (4, 64, 5000):
        keys = [some_keys(file, count, rng) for file in files]
        expected, num_unknown = answers(host, files, keys, pooling)
        for each in tables:
            vectors, counted = answers(each, files, keys, pooling)
            assert counted.tolist() == num_unknown.tolist()
            for found, wanted in zip(vectors, expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_rows_are_divided_evenly(tables: list[Any], files: list[TableFile]) -> None:
    """Every GPU has the same part of each table, to a row; what is said of the placement names all of them."""
    for each in tables:
        placement = each.placement
        assert placement.device.count(",") == len(tables) - 1
        assert placement.on_host == []
        assert placement.sharded == ([file.spec.folder for file in files[:-1]] if len(tables) > 1 else [])


def test_the_largest_table_is_sharded_where_it_must_be(files: list[TableFile]) -> None:
    """With a budget for half of it and copies of the others; with a smaller one it stays on the host."""
    from inference_session.device.placement import bytes_on_each
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    specs = [file.spec for file in files]
    places = ["shards" if spec.folder == "wide" else "device" for spec in specs]
    budget = bytes_on_each(specs, places, 2)  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    keys = [some_keys(file, 100, rng) for file in files]
    expected, _ = answers(HostTables(files, num_threads=1), files, keys, PoolingCode.NONE)
    for cache_bytes, sharded, on_host in ((budget, ["wide"], []), (budget // 2, [], ["wide"])):
        opened = open_cuda_tables(files, devices_of(2), cache_bytes=cache_bytes)
        for each in opened:
            assert (each.placement.sharded, each.placement.on_host) == (sharded, on_host)
            for found, wanted in zip(answers(each, files, keys, PoolingCode.NONE)[0], expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-6)
        for each in opened:
            each.close()


def test_shards_that_do_not_fit_are_refused(files: list[TableFile]) -> None:
    """With the memory needed, the memory available, and what to do."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    with pytest.raises(ConfigurationError, match=r"shard=rows needs \d+ bytes on each of 2 GPUs, .* may take 1000"):
        open_cuda_tables(files, devices_of(2), cache_bytes=1000, shard="rows")


NUM_ROWS, NUM_HOT, DIM = 480_000, 400, 32
Draw = Callable[[], NDArray[np.int64]]


@pytest.fixture(scope="module", params=["stored", "row_number"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TableFile:
    """A table large enough for copies of hot rows."""
    folder: Path = tmp_path_factory.mktemp(request.param) / "large"
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, NUM_ROWS)))
    given = [keys] if request.param == "stored" else None
    write_table(folder, [rng.standard_normal((NUM_ROWS, DIM), np.float32)], keys=given)
    spec = TableSpec("large", "large", NUM_ROWS, DIM, keys=request.param, default_vector=(0.5,) * DIM)
    return TableFile.open(folder, spec)


@pytest.fixture
def without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are copied when a test says so."""
    from inference_session.tables.cuda import local_copies

    monkeypatch.setattr(local_copies, "_INTERVAL_S", 1e6)


def skewed(file: TableFile, seed: int, *, exponent: float = 0.0, count: int = 1 << 16) -> Draw:
    """Draws keys: nine in ten of few rows, the others of all rows, and unknown ones. Few rows by a power law."""
    rng = np.random.default_rng(seed)
    hot, uses = rng.choice(NUM_ROWS, NUM_HOT, replace=False), np.arange(1, NUM_HOT + 1) ** -exponent

    def draw() -> NDArray[np.int64]:
        of_few = rng.choice(hot, count, p=uses / uses.sum())
        numbers = np.where(rng.random(count) < 0.9, of_few, rng.integers(0, NUM_ROWS, count))
        if file.spec.keys == "row_number":
            return np.where(rng.random(len(numbers)) < 0.1, numbers - NUM_ROWS, numbers)
        return np.where(rng.random(len(numbers)) < 0.01, 7, np.asarray(file.keys())[numbers])

    return draw


def check(tables: list[Any], file: TableFile, draw: Draw, count: int = 1) -> None:
    """So many look-ups; the last of them is compared: every GPU answers as the processor, bit for bit."""
    host = HostTables([file], num_threads=1)
    for each in tables:
        for _ in range(count):
            keys = [draw()]
            found, counted = answers(each, [file], keys, PoolingCode.NONE)
        expected, num_unknown = answers(host, [file], keys, PoolingCode.NONE)
        assert counted.tolist() == num_unknown.tolist()
        np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.usefixtures("without_thread")
def test_hot_rows_of_other_gpus_are_copied(large: TableFile) -> None:
    """Those that the traffic asks for, once; when it asks for others, those. All answers stay the same."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    tables = open_cuda_tables([large], devices_of(2), shard="rows")
    before = [each.placement.bytes for each in tables]
    for seed in (1, 2):
        draw = skewed(large, seed)
        check(tables, large, draw, 40)
        copied = [each.copy_hot_rows() for each in tables]
        assert all(NUM_HOT // 4 < count < NUM_HOT for count in copied), copied  # half of them lie on the other GPU
        check(tables, large, draw, 40)
        again = [each.copy_hot_rows() for each in tables]
        assert all(count < NUM_HOT // 8 for count in again), again
        check(tables, large, skewed(large, seed, count=1 << 18))  # tiles of 32 keys, of copies and of others
        pooled, _ = answers(tables[0], [large], [keys := draw()], PoolingCode.SUM)
        expected, _ = answers(HostTables([large], num_threads=1), [large], [keys], PoolingCode.SUM)
        np.testing.assert_allclose(pooled[0], expected[0], rtol=1e-5, atol=1e-5)
    assert all(each.placement.bytes > least for each, least in zip(tables, before, strict=True))
    for each in tables:
        each.close()


@pytest.mark.usefixtures("without_thread")
def test_copies_stay_where_there_is_no_room_for_all_hot_rows(large: TableFile) -> None:
    """Rows that are read less than a copy on average take no place of another one."""
    from inference_session.device.placement import bytes_on_each
    from inference_session.kernels.cuda.records import SLOTS, table_bytes
    from inference_session.tables.cuda.local_copies import samples_bytes
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    needed = bytes_on_each([large.spec], ["shards"], 2)
    spare = samples_bytes(0) + table_bytes(1, large.spec.row_bytes)
    tables = open_cuda_tables([large], devices_of(2), shard="rows", cache_bytes=needed + spare)
    draw = skewed(large, 1, exponent=0.7)
    check(tables, large, draw, 150)
    assert all(SLOTS * 3 // 4 < each.copy_hot_rows() < SLOTS for each in tables)
    check(tables, large, draw, 150)
    assert [each.copy_hot_rows() for each in tables] == [0, 0]
    for each in tables:
        each.close()


@pytest.mark.usefixtures("without_thread")
def test_rows_that_are_equally_cold_are_not_copied(large: TableFile) -> None:
    """Nor are those of a table without memory to spare."""
    from inference_session.device.placement import bytes_on_each
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(3)
    needed = bytes_on_each([large.spec], ["shards"], 2)
    for cache_bytes, draw in (
        (None, lambda: some_keys(large, 1 << 16, rng)),
        (needed + (1 << 16), skewed(large, 1)),
    ):
        tables = open_cuda_tables([large], devices_of(2), shard="rows", cache_bytes=cache_bytes)
        check(tables, large, draw, 40)
        assert [each.copy_hot_rows() for each in tables] == [0, 0]
        for each in tables:
            each.close()


def test_hot_rows_are_copied_without_being_asked(large: TableFile) -> None:
    """By a thread, while look-ups go on."""
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    tables, draw = open_cuda_tables([large], devices_of(2), shard="rows"), skewed(large, 4)
    before = [each.placement.bytes for each in tables]

    def copied() -> bool:
        check(tables, large, draw, 5)
        return all(each.placement.bytes > least for each, least in zip(tables, before, strict=True))

    wait_until(copied, "rows to be copied")
    check(tables, large, draw, 5)
    for each in tables:
        each.close()
