"""Look-ups of rows of all types on a GPU: the sums and means that NumPy computes, whatever the bags; and outputs in
float16, which are those in float32, rounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.device.discovery import unusable
from inference_session.kernels.records import Lookup, PoolingCode, VectorCode, address_of, key_segments
from inference_session.model_spec import TableSpec, VectorType
from inference_session.tables.quantized_rows import dequantize_rows
from inference_session.tables.table_file import TableFile, write_table

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(unusable(0) is not None, reason=f"no GPU: {unusable(0)}")]
ROWS = 500


def _bags(rng: np.random.Generator, *, even: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Keys, and where the bags of them begin and end: many of one length, or of any, among them empty and long ones."""
    lengths = np.full(70, rng.integers(1, 20)) if even else rng.choice([0, 0, 1, 1, 1, 2, 3, 7, 8, 9, 40, 100], 70)
    ends = np.cumsum(lengths)
    keys = rng.integers(-ROWS, ROWS, int(ends[-1]))  # negative ones count from the end
    return keys, ends - lengths, ends


def _expected(
    rows: NDArray[np.float32], keys: NDArray[np.int64], begins: Any, ends: Any, *, mean: bool
) -> NDArray[np.float64]:
    sums = np.array([rows[keys[b:e]].sum(axis=0, dtype=np.float64) for b, e in zip(begins, ends, strict=True)])
    return sums / np.maximum(ends - begins, 1)[:, None] if mean else sums


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("dim", [4, 32, 128, 132, 200, 512])
@pytest.mark.parametrize("mean", [False, True])
def test_sums_of_quantized_rows(tmp_path: Path, dtype: VectorType, dim: int, mean: bool) -> None:
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(dim)
    write_table(tmp_path / "t", [rng.standard_normal((ROWS, dim), np.float32)], dtype=dtype)
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", ROWS, dim, dtype, "row_number", default_vector=0.5))
    rows = dequantize_rows(file.vectors, dtype)
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device])
    for even in (True, False, True, False):
        keys, begins, ends = _bags(rng, even=even)
        with device.request():
            on_device = [cupy.asarray(array) for array in (keys, begins, ends)]
            out = cupy.full((len(begins), dim), np.nan, np.float32)
            segment = key_segments([on_device[0]], [out])
            segment["num_rows"], segment["keys_per_row"] = len(begins), len(keys) // len(begins)
            segment["row_stride"] = 8 * segment["keys_per_row"]
            segment["pooling"] = PoolingCode.MEAN if mean else PoolingCode.SUM
            if not even:
                segment["begins_address"], segment["ends_address"] = map(address_of, on_device[1:])
            tables.look_up(Lookup(segment, np.array([len(keys)]), device.counts(1), tables.prepare(segment)))
            device.wait()
            found = out.get()
        np.testing.assert_allclose(found, _expected(rows, keys, begins, ends, mean=mean), rtol=1e-4, atol=1e-4)
    tables.close()
    file.close()


def _pool(
    tables: Any, device: Any, bags: list[NDArray[np.int64]], dim: int, weights: Any = None
) -> NDArray[np.float32]:
    """The sums of bags in one look-up; `weights`: of each key, on the device."""
    import cupy

    lengths = np.array([len(bag) for bag in bags])
    with device.request():
        keys, ends = cupy.asarray(np.concatenate(bags)), cupy.asarray(np.cumsum(lengths))
        begins = ends - cupy.asarray(lengths)
        out = cupy.full((len(bags), dim), np.nan, np.float32)
        segment = key_segments([keys], [out], pooling=PoolingCode.SUM)
        segment["num_rows"] = len(bags)
        segment["begins_address"], segment["ends_address"] = address_of(begins), address_of(ends)
        segment["weights_address"] = 0 if weights is None else address_of(weights)
        tables.look_up(Lookup(segment, np.array([len(keys)]), device.counts(1), tables.prepare(segment)))
        device.wait()
        return np.asarray(out.get())


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("dim", [3, 4, 16, 64, 128, 132, 200])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_long_bags(tmp_path: Path, dtype: VectorType, dim: int, weighted: bool) -> None:
    """They are about as exact as float32 has digits, and the same to the last bit alone and among many others."""
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(dim)
    write_table(tmp_path / "t", [rng.standard_normal((ROWS, dim), np.float32)], dtype=dtype)
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", ROWS, dim, dtype, "row_number", default_vector=0.5))
    rows = dequantize_rows(file.vectors, dtype).astype(np.float32)
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device])
    lengths = [*rng.choice([1, 2, 3, 7, 31, 32, 33, 64, 65], 20_000), 200, 1, 10_000, 31, 100_000, 33, 200]
    bags = [rng.integers(0, ROWS, length) for length in lengths]
    weights = rng.standard_normal(sum(map(len, bags)), np.float32) if weighted else None
    found = _pool(tables, device, bags, dim, None if weights is None else cupy.asarray(weights))
    ends = np.cumsum(lengths)
    for i in (*range(64), *range(20_000, len(bags))):
        end, length = ends[i], lengths[i]
        own = None if weights is None else weights[end - length : end]
        vectors = rows[bags[i]] * (1 if own is None else own[:, None])
        exact = vectors.sum(axis=0, dtype=np.float64)
        size = np.hypot(np.linalg.norm(exact), np.linalg.norm(vectors.astype(np.float64)))
        assert np.linalg.norm(found[i] - exact) <= 2 * np.finfo(np.float32).eps * size
        on_device = None if own is None else cupy.asarray(own)
        np.testing.assert_array_equal(_pool(tables, device, [bags[i]], dim, on_device)[0], found[i])
    tables.close()
    file.close()


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("dim", [32, 64, 128, 132])
@pytest.mark.parametrize("cache_bytes", [None, 0], ids=["device", "host"])
def test_vectors_of_many_keys(tmp_path: Path, dtype: VectorType, dim: int, cache_bytes: int | None) -> None:
    """Of more keys than small tiles are made for, in rows of a wider matrix, of which nothing else is written."""
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(dim)
    write_table(tmp_path / "t", [rng.standard_normal((ROWS, dim), np.float32)], dtype=dtype)
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", ROWS, dim, dtype, "row_number", default_vector=0.5))
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device], cache_bytes=cache_bytes)
    rows = np.vstack([dequantize_rows(file.vectors, dtype), np.full((1, dim), 0.5, np.float32)])
    with device.request():
        numbers = rng.integers(0, ROWS, 140_001)
        numbers[rng.integers(0, len(numbers), 5)] = ROWS  # no row
        keys, out = cupy.asarray(numbers), cupy.full((len(numbers), dim + 8), np.nan, np.float32)
        segment = key_segments([keys], [out[:, 4:-4]])
        tables.look_up(Lookup(segment, np.array([keys.size]), device.counts(1), tables.prepare(segment)))
        device.wait()
        found = out.get()
    np.testing.assert_array_equal(found[:, 4:-4], rows[numbers])
    assert np.isnan(found[:, :4]).all()
    assert np.isnan(found[:, -4:]).all()
    tables.close()
    file.close()


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
@pytest.mark.parametrize("dim", [3, 4, 128, 132, 514])
@pytest.mark.parametrize("cache_bytes", [None, 0], ids=["device", "host"])
def test_outputs_in_float16(tmp_path: Path, dtype: VectorType, dim: int, cache_bytes: int | None) -> None:
    """All poolings, single keys and bags, unknown keys, rows on the device and in host memory; each output is the
    rounded one of float32, and nothing beyond it is written.
    """
    import cupy

    from inference_session.device.cuda import CudaDevice
    from inference_session.tables.cuda.placed_tables import open_cuda_tables

    rng = np.random.default_rng(dim)
    write_table(tmp_path / "t", [rng.standard_normal((ROWS, dim), np.float32)], dtype=dtype)
    file = TableFile.open(tmp_path / "t", TableSpec("t", "t", ROWS, dim, dtype, "row_number", default_vector=0.1))
    device = CudaDevice(0)
    (tables,) = open_cuda_tables([file], [device], cache_bytes=cache_bytes)
    with device.request():
        keys = cupy.asarray(rng.integers(-ROWS, ROWS + 3, (90, 5)))
        for pooling in PoolingCode:
            width = dim if pooling else 5 * dim
            found = []
            for output_type in (np.float32, np.float16):
                out = cupy.full((92, width), 7.0, output_type)
                segment = key_segments([keys], [out[1:-1]], pooling=pooling)
                segment["output_code"] = VectorCode[np.dtype(output_type).name.upper()]
                tables.look_up(Lookup(segment, np.array([keys.size]), device.counts(1), tables.prepare(segment)))
                device.wait()
                found.append(out.get())
            assert (found[1][[0, -1]] == 7).all()
            np.testing.assert_array_equal(found[1], found[0].astype(np.float16))
    tables.close()
    file.close()
