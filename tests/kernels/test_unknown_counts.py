"""Keys without a row, counted by many warps at once: each segment's number is right, in each run of a look-up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.kernels.cuda import records
from inference_session.kernels.cuda.records import MAX_INLINE_SEGMENTS
from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.model_spec import TableSpec
from inference_session.rows.updated import UpdatedRowWriter
from inference_session.tables.table_file import TableFile, write_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(unusable(0) is not None, reason=f"no GPU: {unusable(0)}")]
ROWS, DIM, RUNS = 1000, 12, 5


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TableFile]:
    """Rows of ones, known by their numbers."""
    write_table(tmp_path / "t", [np.ones((ROWS, DIM), np.float32)])
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", ROWS, DIM, keys="row_number"))
    yield file
    file.close()


def _asked(sizes: list[int], rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Keys of each segment: none unknown, few, half, or all."""
    shares = rng.choice([0, 0.01, 0.5, 1], len(sizes))
    return [rng.integers(0, ROWS, n) + ROWS * (rng.random(n) < share) for n, share in zip(sizes, shares, strict=True)]


def _segments(asked: list[Any], outputs: list[Any], bag: int) -> NDArray[np.void]:
    """Of keys on the device; the rows of so many are added up, 0: of none."""
    pooling = PoolingCode.SUM if bag else PoolingCode.NONE
    bags = [keys.reshape(-1, max(bag, 1)) for keys in asked]
    return key_segments(bags, outputs, [0] * len(bags), pooling)


def _check(tables: Any, device: Any, sizes: list[int], bag: int, is_known: Any) -> None:
    """Runs of two look-ups in turn, both prepared once."""
    import cupy

    rng = np.random.default_rng(len(sizes))
    with device.request():
        expected, lookups, held = [], [], []
        for _ in range(2):
            asked = _asked(sizes, rng)
            on_device = [cupy.asarray(keys) for keys in asked]
            outputs = [cupy.empty((len(keys) // max(bag, 1), DIM), np.float32) for keys in asked]
            segments = _segments(on_device, outputs, bag)
            held.append((on_device, outputs))
            num_keys = np.array([len(keys) for keys in asked])
            lookups.append(Lookup(segments, num_keys, device.counts(len(sizes)), tables.prepare(segments)))
            expected.append([int((~is_known(keys)).sum()) for keys in asked])
        for _ in range(RUNS):
            for lookup, numbers in zip(lookups, expected, strict=True):
                lookup.num_unknown[:] = 0
                tables.look_up(lookup)
                device.wait()
                assert lookup.num_unknown.tolist() == numbers
        del held


@pytest.mark.parametrize("bag", [0, 4, 64])
@pytest.mark.parametrize(
    "sizes", [[200_000], [64] * 26, [6400] * (MAX_INLINE_SEGMENTS + 4)], ids=["one", "small", "many"]
)
@pytest.mark.parametrize("place", ["device", "host"])
def test_keys_of_files(
    file: TableFile, place: str, sizes: list[int], bag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In host memory, the keys are taken in an order of their own where there are few segments."""
    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    if place == "host":
        monkeypatch.setattr(records, "_LEAST_ORDERED_KEYS", 1)
        monkeypatch.setattr(records, "_LEAST_ORDERED_BYTES", 1)
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device], cache_bytes=0 if place == "host" else 1 << 26)
    assert bool(tables.placement.on_host) == (place == "host")
    _check(tables, device, sizes, bag, lambda keys: keys < ROWS)
    tables.close()


@pytest.mark.parametrize("bag", [0, 4])
def test_deleted_keys(file: TableFile, bag: int) -> None:
    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    device = CudaDevice(0)
    tables = open_cuda_tables([file], [device], rows_change=True)
    writer = UpdatedRowWriter([file], tables)
    writer.update("t", np.arange(100), np.ones((100, DIM), np.float32))
    writer.erase("t", np.arange(50, 150))
    _check(tables[0], device, [100_000, 64, 5000], bag, lambda keys: (keys < 50) | (keys >= 150) & (keys < ROWS))
    tables[0].close()


@pytest.mark.parametrize("bag", [0, 4])
def test_keys_that_a_cache_lacks(bag: int) -> None:
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    device = CudaDevice(0)
    with GpuEmbeddingCache({"t": DIM}, 1 << 24, device) as cache:
        cache.insert("t", np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
        _check(cache, device, [100_000, 64, 5000], bag, lambda keys: keys < ROWS)
