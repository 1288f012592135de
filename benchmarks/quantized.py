"""Look-ups in float16 and int8 tables on the CPU, compared with float32, in one run.

    python benchmarks/quantized.py            1 M rows x 128, 0.9 GB of files
    python benchmarks/quantized.py --full     4 M rows x 128, 3.6 GB of files

Tables are larger than the processor's caches, outputs are not. Every repetition draws fresh keys, poisons the outputs
and checks them. A line shows the bytes of a row and the medians over the repetitions next to those of float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import TABLE, PoolingCode, key_segments
from inference_session.model_spec import TableSpec, VectorType
from inference_session.tables.quantized_rows import dequantize_rows
from inference_session.tables.table_file import TableFile, write_table

NUM_ROWS, NUM_ROWS_FULL = 1_000_000, 4_000_000
DIM = 128
CALLS, REPETITIONS = 16, 15
KEYS_PER_CALL = 2048
BAG = 16
TYPES: tuple[VectorType, ...] = ("float32", "float16", "int8")

Rows = NDArray[np.int64]


def write_tables(folder: Path, num_rows: int) -> dict[VectorType, TableFile]:
    """The same random rows in each type, by row number."""
    files: dict[VectorType, TableFile] = {}
    for dtype in TYPES:
        random = np.random.default_rng(0)
        write_table(
            folder / dtype,
            (random.standard_normal((n, DIM), np.float32) for n in [10_000] * (num_rows // 10_000)),
            dtype=dtype,
        )
        files[dtype] = TableFile.open(folder / dtype, TableSpec(dtype, dtype, num_rows, DIM, dtype, "row_number"))
    return files


def seconds_of(file: TableFile, keys: Rows, bag: int) -> float:
    """The processor time of CALLS look-ups, [CALLS, KEYS_PER_CALL]; their answers are checked."""
    records = np.array([file.record()], TABLE)
    out = np.full((KEYS_PER_CALL // bag, DIM), np.nan, np.float32)
    pooling = PoolingCode.SUM if bag > 1 else PoolingCode.NONE
    segments = [key_segments([part.reshape(-1, bag)], [out], pooling=pooling) for part in keys]
    started = time.thread_time()
    for one in segments:
        cpu.look_up(records, one, np.zeros(1, np.int64), np.empty(0, np.int64), 1)
    seconds = time.thread_time() - started
    vectors = dequantize_rows(file.vectors[keys[-1]], file.spec.dtype).reshape(-1, bag, DIM)
    np.testing.assert_allclose(out, vectors.sum(axis=1), rtol=1e-4, atol=1e-4)
    return seconds


def compare(files: dict[VectorType, TableFile], num_rows: int, bag: int) -> None:
    """Each type in turn with separate keys."""
    random = np.random.default_rng()
    times: dict[VectorType, list[float]] = {dtype: [] for dtype in files}
    for _ in range(REPETITIONS):
        for dtype, file in files.items():
            keys = random.integers(0, num_rows, (CALLS, KEYS_PER_CALL))
            times[dtype].append(seconds_of(file, keys, bag))
    what = f"{KEYS_PER_CALL} keys a call" + (f", sums of {bag}" if bag > 1 else "")
    for dtype in TYPES[1:]:
        ratios = np.array(times["float32"]) / np.array(times[dtype])
        rate = CALLS * KEYS_PER_CALL / float(np.median(times[dtype])) / 1e6
        print(
            f"{dtype:<8} {what:<32} {rate:7.1f} M rows/s  compared with float32 {np.median(ratios):5.2f} "
            f"({ratios.min():.2f}-{ratios.max():.2f}){'  goal >= 2' if dtype == 'int8' else ''}"
        )


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description="Quantized tables compared with float32 on the CPU.")
    parser.add_argument("--full", action="store_true", help="4 M rows x 128")
    parser.add_argument("--folder", type=Path, help="where to write the tables (default: the temporary folder)")
    arguments = parser.parse_args()
    num_rows = NUM_ROWS_FULL if arguments.full else NUM_ROWS
    cpu.compile_kernels()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        files = write_tables(Path(name), num_rows)
        for dtype, file in files.items():
            part = file.spec.row_bytes / (4 * DIM)
            print(f"{dtype:<8} {file.spec.row_bytes} bytes a row, {part:.3f} of float32")
        for bag in (1, BAG):
            compare(files, num_rows, bag)


if __name__ == "__main__":
    main()
