"""Keys near each other on a GPU: a tag says which of them a slot holds, unless the index has others too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.kernels.records import Lookup, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile, write_table
from tests.testing.cache_contract import HIGHEST, LOWEST, vectors_of
from tests.testing.cache_lookups import look_up
from tests.testing.missed_rows import missed_rows

NO_GPU = unusable(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=f"no GPU: {NO_GPU}")]
DIM = 4


def near_keys(rng: np.random.Generator, count: int, first: int, gaps: int) -> NDArray[np.int64]:
    """Distinct keys from `first` on, one in `gaps` of them; in any order."""
    numbers = rng.choice(count * gaps, count, replace=False)
    return np.array([min(first + number, HIGHEST) for number in numbers.tolist()], np.int64)


def asked_of(keys: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """All of these keys, their neighbours, keys between them, keys far away, and extremes."""
    with np.errstate(over="ignore"):
        neighbours = np.concatenate([keys - 1, keys + 1, keys + (1 << 20)])
    others = np.concatenate([rng.integers(LOWEST, HIGHEST, 500), [LOWEST, HIGHEST, 0, -1]])
    asked: NDArray[np.int64] = rng.permutation(np.concatenate([keys, keys, neighbours, others]))
    return asked


@pytest.mark.parametrize("gaps", [1, 3, 9, 1000])
@pytest.mark.parametrize("first", [0, 10**12, -5000, LOWEST, HIGHEST - 30_000_000])
@pytest.mark.parametrize("with_others", [False, True])
def test_rows_of_files_are_found(gaps: int, first: int, with_others: bool, tmp_path: Path) -> None:
    """Whatever their keys are near to, and no other keys are."""
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(gaps)
    keys = near_keys(rng, 30_000, first, gaps)
    if with_others:
        keys[:3] = rng.integers(0, HIGHEST, 3)
    keys = np.unique(keys)
    vectors = rng.random((len(keys), DIM), np.float32)
    write_table(tmp_path / "t", [vectors], keys=[keys])
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", len(keys), DIM, keys="stored", default_vector=-1.0))
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device])
    asked = asked_of(keys, rng)
    with device.request():
        on_device, output = cupy.asarray(asked), device.empty((len(asked), DIM))
        segments = key_segments([on_device], [output])
        segments["row_stride"] = 8
        tables.look_up(Lookup(segments, np.array([len(asked)]), device.counts(1), tables.prepare(segments)))
        device.wait()
        found = output.get()
    rows = np.searchsorted(keys, asked).clip(0, len(keys) - 1)
    expected = np.where((keys[rows] == asked)[:, None], vectors[rows], -1.0)
    np.testing.assert_array_equal(found, expected)
    tables.close()
    file.close()


@settings(max_examples=25)
@given(
    steps=st.lists(st.sampled_from(["insert", "update", "erase", "insert far", "insert missing"]), max_size=12),
    first=st.sampled_from([0, 0, 100, -3, 10**9]),
    gaps=st.sampled_from([1, 2, 5, 50]),
    seed=st.integers(0, 2**32 - 1),
)
def test_cached_rows_are_found(steps: list[str], first: int, gaps: int, seed: int) -> None:
    """After any writes, also of other keys and beyond the capacity: just the rows that the cache says it holds."""
    from inference_session.device.cuda import CudaDevice
    from inference_session.embedding_cache.gpu import GpuEmbeddingCache

    rng = np.random.default_rng(seed)
    latest: dict[int, int] = {}
    with GpuEmbeddingCache({"t": DIM}, 40_000, CudaDevice(0)) as cache:
        for version, step in enumerate(["insert", *steps], 1):
            keys = near_keys(rng, 400, first, gaps)
            if step == "insert far":
                keys[::7] = rng.integers(LOWEST, HIGHEST, len(keys[::7]))
            _write(cache, step, keys, version)
            held = set(cache.dump("t").tolist())
            latest.update(dict.fromkeys(held.intersection(keys.tolist()), version))
            asked = asked_of(np.array(sorted(latest), np.int64), rng)
            found = look_up(cache, {"t": asked})
            expected_missing = [i for i, key in enumerate(asked.tolist()) if key not in held]
            assert found.missing["t"].tolist() == expected_missing
            versions = np.array([latest[key] if key in held else -1 for key in asked.tolist()], np.float32)
            wanted = np.where(versions[:, None] > 0, vectors_of(asked, DIM) + versions[:, None], 0)
            np.testing.assert_array_equal(found.vectors["t"], wanted)


def _write(cache: Any, step: str, keys: NDArray[np.int64], version: int) -> None:
    vectors = vectors_of(keys, DIM, version)
    if step == "update":
        cache.update("t", keys, vectors)
    elif step == "erase":
        cache.erase("t", keys)
    elif step == "insert missing":
        rows = missed_rows([DIM], [keys])
        part = rows.by_table[0]
        part.vectors[:] = vectors_of(part.keys, DIM, version)
        cache.insert_missing([rows])
    else:
        cache.insert("t", keys, vectors)
