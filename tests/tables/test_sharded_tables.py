"""Tables whose rows are divided among GPUs: each GPU looks up all rows, as the processor does.

Where there is one GPU, shards lie on it side by side: the same kernels run, but read no other GPU's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inference_session.device.discovery import unusable
from inference_session.errors import ConfigurationError
from inference_session.kernels.records import PoolingCode
from inference_session.tables.host_tables import HostTables
from inference_session.tables.table_file import TableFile
from tests.testing.tables_of_all_kinds import answers, devices_of, some_keys

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]


@pytest.fixture(scope="module", params=[1, 2, 3, 8])
def tables(request: pytest.FixtureRequest, files: list[TableFile]) -> Iterator[list[Any]]:
    """The tables as each of several devices looks them up."""
    from inference_session.tables.placed_tables import open_cuda_tables

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
    from inference_session.tables.placed_tables import open_cuda_tables

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
    from inference_session.tables.placed_tables import open_cuda_tables

    with pytest.raises(ConfigurationError, match=r"shard=rows needs \d+ bytes on each of 2 GPUs, .* may take 1000"):
        open_cuda_tables(files, devices_of(2), cache_bytes=1000, shard="rows")
