"""Keys of rows in host memory, which large look-ups take by region of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.kernels.cuda import records
from inference_session.kernels.cuda.records import MAX_INLINE_SEGMENTS, NOT_ORDERED, regions_of
from inference_session.kernels.records import SEGMENT, Lookup, PoolingCode, VectorCode, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile, write_table

GIB = 1 << 30


def segments_of(tables: list[int], num_keys: list[int]) -> NDArray[np.void]:
    segments = np.zeros(len(tables), SEGMENT)
    segments["table"], segments["num_rows"], segments["keys_per_row"] = tables, num_keys, 1
    return segments


def test_each_segment_in_host_memory_has_regions_of_its_own() -> None:
    """They cover all rows; segments on the device, and pooled ones, stay as they are."""
    num_rows, row_bytes = np.array([4_000_000, 0, 3]), np.array([512, 512, 128])
    segments = segments_of([0, 1, 2, 0, 0], [9000, 10**6, 1, 7, 50])
    segments["pooling"][4] = PoolingCode.SUM
    regions = regions_of(segments, num_rows, row_bytes)
    assert regions is not None
    assert regions.begins.tolist() == [0, NOT_ORDERED, 9000, 9001, NOT_ORDERED]
    assert regions.num_keys == 9008
    firsts, rows_per_region = regions.of_segments[[0, 2, 3]].astype(np.int64).T
    assert (rows_per_region * row_bytes[[0, 2, 0]] >= 2 << 20).all()
    lasts = firsts + (num_rows[[0, 2, 0]] - 1) // rows_per_region
    assert [*firsts[1:], regions.num_regions] == (lasts + 1).tolist()
    assert regions.num_regions < 3 * 4096


@pytest.mark.parametrize(
    ("num_keys", "num_bytes", "num_segments"),
    [(100, 8 * GIB, 1), (10**6, GIB // 2, 1), (10**6, 8 * GIB, MAX_INLINE_SEGMENTS + 1)],
    ids=["few keys", "little memory", "many segments"],
)
def test_keys_stay_as_they_are(num_keys: int, num_bytes: int, num_segments: int) -> None:
    """Where an order gains nothing, or is not supported."""
    segments = segments_of([0] * num_segments, [num_keys] * num_segments)
    assert regions_of(segments, np.array([num_bytes // 512]), np.array([512])) is None


@pytest.mark.gpu
@pytest.mark.skipif(unusable(0) is not None, reason=f"no GPU: {unusable(0)}")
@pytest.mark.parametrize("kind", ["row_number", "stored"])
@pytest.mark.parametrize("code", [VectorCode.FLOAT32, VectorCode.FLOAT16])
@pytest.mark.parametrize("rows_per_region", [1, 100, 10**6])
def test_answers_do_not_depend_on_the_order(
    tmp_path: Path,
    kind: Literal["row_number", "stored"],
    code: VectorCode,
    rows_per_region: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two tables in host memory and one on the device, keys often, from the end and unknown, of both types, one or
    several a sample: the vectors and the counts of unknown keys are those of rows on the device.
    """
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    dim, num_rows, rng = 12, (700, 5000, 3000), np.random.default_rng(rows_per_region)
    files = _tables(tmp_path, kind, num_rows, dim, rng)
    device = CudaDevice(0)
    looks: list[tuple[int, Any]] = [
        (1, rng.integers(-6000, 6000, (3000, 1))),
        (0, rng.integers(-800, 800, (40, 3)).astype(np.int32)),
        (2, rng.choice([-5, 7, 2999, 3000], (1500, 2))),
        (1, rng.integers(0, 10, (1, 1))),
    ]
    answers: list[Any] = []
    monkeypatch.setattr(records, "_LEAST_ORDERED_KEYS", 1)
    monkeypatch.setattr(records, "_LEAST_ORDERED_BYTES", 1)
    monkeypatch.setattr(records, "_LEAST_REGION_BYTES", rows_per_region * dim * 4)
    for cache_bytes in (1 << 26, 40_000 if kind == "row_number" else 300_000):
        (tables,) = open_cuda_tables(files, [device], cache_bytes=cache_bytes)
        assert tables.placement.on_host == ([] if not answers else ["t1", "t2"])
        with device.request():
            lookup, outputs, held = _lookup(looks, device, tables, code, dim)
            for _ in range(3):  # the order is computed again each time
                for output in outputs:
                    output.fill(np.nan)
                lookup.num_unknown[:] = 0
                tables.look_up(lookup)
                device.wait()
                answers.append(([output.get() for output in outputs], lookup.num_unknown.tolist()))
            del held
        tables.close()
    cupy.get_default_memory_pool().free_all_blocks()
    for outputs, num_unknown in answers[1:]:
        assert num_unknown == answers[0][1]
        for found, expected in zip(outputs, answers[0][0], strict=True):
            np.testing.assert_array_equal(found, expected)
            assert not np.isnan(found).any()
    for file in files:
        file.close()


def _tables(
    folder: Path, kind: Literal["row_number", "stored"], num_rows: tuple[int, ...], dim: int, rng: np.random.Generator
) -> list[TableFile]:
    """Tables of random rows; their default vectors are 0.25."""
    files = []
    for i, n in enumerate(num_rows):
        keys = None if kind == "row_number" else [rng.permutation(n) - 50]
        write_table(folder / f"t{i}", [rng.standard_normal((n, dim), np.float32)], keys=keys)
        spec = TableSpec(f"t{i}", f"t{i}", n, dim, keys=kind, default_vector=0.25)
        files.append(TableFile.open(folder / f"t{i}", spec))
    return files


def _lookup(
    looks: list[tuple[int, Any]], device: Any, tables: Any, code: VectorCode, dim: int
) -> tuple[Lookup, list[Any], list[Any]]:
    """The look-up of tables and keys [rows, keys of a row], its outputs, and its keys."""
    import cupy

    keys = [cupy.asarray(array) for _, array in looks]
    outputs = [cupy.empty((len(k), k.shape[1] * dim), code.name.lower()) for k in keys]
    segments = key_segments(keys, outputs, [table for table, _ in looks])
    segments["output_code"] = code
    num_keys = np.array([k.size for k in keys])
    return Lookup(segments, num_keys, device.counts(len(looks)), tables.prepare(segments)), outputs, keys
