"""The CPU look-up beside the ceilings of its machine, in one run: goals G5 and G6, fused tables, threads.

    python benchmarks/lookup.py            1 M rows, under a minute
    python benchmarks/lookup.py --full     4 M rows x 128, 2 GiB of vectors

Every repetition draws fresh keys, poisons the outputs and checks them. A line shows the medians over the repetitions,
the median of the ratio within a repetition, and its range.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.embedding_cache.kernels import cpu
from inference_session.embedding_cache.kernels.intrinsics import kernel, load, prefetch, store
from inference_session.embedding_cache.kernels.layout import SEGMENT, TABLE
from inference_session.formats.native import TableSpec
from inference_session.parameter_server.table_file import TableFile, write_table
from inference_session.parameter_server.table_index import build_index

REPETITIONS = 15
KEYS_PER_CALL = 1 << 16
DIM = 128

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Draw = Callable[[int], Rows]


@kernel
def bare_gather(  # noqa: PLR0917
    vectors: int, row_bytes: int, rows: int, num_rows: int, output: int, ahead: int
) -> None:
    """The ceiling: copy rows by known row id, asking for each `ahead` rows before it is copied."""
    for i in range(num_rows):
        if i + ahead < num_rows:
            coming = vectors + load(rows, np.int64, i + ahead) * row_bytes
            for address in range(coming, coming + row_bytes, 64):
                prefetch(address)
        source, target = vectors + load(rows, np.int64, i) * row_bytes, output + i * row_bytes
        for d in range(row_bytes // 4):
            store(target, np.float32, d, load(source, np.float32, d))


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(name: str, ours: list[float], ceiling: list[float], keys: int, goal: str) -> None:
    """One line: rates of both, and ceiling's time over ours."""
    ratios = np.array(ceiling) / np.array(ours)
    print(
        f"{name:<44} other {keys / np.median(ceiling) / 1e6:7.1f}  ours {keys / np.median(ours) / 1e6:7.1f} M keys/s"
        f"  ratio {np.median(ratios):5.2f} ({ratios.min():.2f}-{ratios.max():.2f})  goal {goal}"
    )


def segment(keys: Rows, out: Floats, table: int = 0) -> tuple[int, ...]:
    """The record of a flat list of keys."""
    return (table, keys.ctypes.data, 8, keys.itemsize, 8, len(keys), 1, 0, 0, 0, 0, out.ctypes.data, out.strides[0])


def lookup(tables: NDArray[np.void], segments: NDArray[np.void], num_threads: int = 1) -> int:
    """One call of the kernel."""
    return cpu.lookup(tables, segments, np.zeros(len(segments), np.int64), np.empty(0, np.int64), num_threads)


def gathers(vectors: NDArray[Any], rows: Rows, out: Floats) -> list[Callable[[], None]]:
    """The ceiling in its variants; the fastest counts."""
    addresses = vectors.ctypes.data, 4 * DIM, rows.ctypes.data, len(rows), out.ctypes.data
    return [partial(bare_gather, *addresses, ahead) for ahead in (8, 16, 24, 64)]


def compare_with_gather(table: TableFile, draw: Draw, name: str) -> None:
    """G5: hashed keys beside row ids, over the same mapped file."""
    keys, vectors = table.keys(), table.vectors
    tables = np.array([table.record()], TABLE)
    out = np.empty((KEYS_PER_CALL, DIM), np.float32)
    ours, ceiling = [], []
    for _ in range(REPETITIONS):
        rows, others = draw(KEYS_PER_CALL), draw(KEYS_PER_CALL)
        asked = keys[rows]
        out.fill(np.nan)
        segments = np.array([segment(asked, out)], SEGMENT)
        ours.append(timed(lambda: lookup(tables, segments)))  # noqa: B023
        assert np.array_equal(out, vectors[rows])
        ceiling.append(min(timed(gather) for gather in gathers(vectors, others, out)))
        assert np.array_equal(out, vectors[others])
    report(f"G5 {name}, beside the bare gather", ours, ceiling, KEYS_PER_CALL, ">= 0.65")


def compare_with_searchsorted(table: TableFile, draw: Draw) -> None:
    """G5: what NumPy users do."""
    keys, vectors = np.array(table.keys()), table.vectors
    order = np.argsort(keys)
    ordered = keys[order]
    tables = np.array([table.record()], TABLE)
    out = np.empty((KEYS_PER_CALL, DIM), np.float32)
    ours, numpy = [], []
    for _ in range(5):
        asked = keys[draw(KEYS_PER_CALL)]
        segments = np.array([segment(asked, out)], SEGMENT)
        ours.append(timed(lambda: lookup(tables, segments)))  # noqa: B023
        asked = keys[draw(KEYS_PER_CALL)]
        numpy.append(timed(lambda: np.take(vectors, order[np.searchsorted(ordered, asked)], axis=0, out=out)))  # noqa: B023
    report("G5 beside searchsorted + take", ours, numpy, KEYS_PER_CALL, ">= 3")


def compare_threads(table: TableFile, draw: Draw) -> None:
    """One request over two threads beside one."""
    tables = np.array([table.record()], TABLE)
    out = np.empty((KEYS_PER_CALL, DIM), np.float32)
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(REPETITIONS):
        for num_threads, taken in times.items():
            rows = draw(KEYS_PER_CALL)
            asked = table.keys()[rows]
            out.fill(np.nan)
            segments = np.array([segment(asked, out)], SEGMENT)
            taken.append(timed(lambda: lookup(tables, segments, num_threads)))  # noqa: B023
            assert np.array_equal(out, table.vectors[rows])
    report("2 threads beside 1", times[2], times[1], KEYS_PER_CALL, ">= 1.7")


def compare_fused(folder: Path, dim: int, num_rows: int) -> None:
    """26 tables x 64 keys in one call, beside 26 takes by row id."""
    files = []
    generator = np.random.default_rng()
    for t in range(26):
        vectors = generator.random((num_rows, dim), np.float32)
        keys = generator.integers(-(2**63), 2**63 - 1, num_rows)
        write_table(folder / f"t{t}", [vectors], keys=[keys])
        files.append(TableFile.open(folder / f"t{t}", TableSpec(f"t{t}", f"t{t}", num_rows, dim)))
    arrays = [np.array(file.vectors) for file in files]
    tables = np.array([file.record() for file in files], TABLE)
    out = np.empty((64, 26, dim), np.float32)
    ours, numpy = [], []
    for _ in range(40 * REPETITIONS):
        rows = generator.integers(0, num_rows, (26, 64))
        asked = np.stack([file.keys()[r] for file, r in zip(files, rows, strict=True)])
        out.fill(np.nan)
        segments = np.array([segment(asked[t], out[:, t], t) for t in range(26)], SEGMENT)
        ours.append(timed(lambda: lookup(tables, segments)))  # noqa: B023
        others = generator.integers(0, num_rows, (26, 64))
        numpy.append(timed(lambda: [a.take(r, axis=0) for a, r in zip(arrays, others, strict=True)]))  # noqa: B023
        assert all(np.array_equal(out[:, t], arrays[t][rows[t]]) for t in range(26))
    report(f"26 tables x 64 keys, dim {dim}, beside 26 takes", ours, numpy, 26 * 64, ">= 2")
    print(f"{'':<44} one call {1e6 * np.median(ours):.1f} us")


def show_opening(folder: Path, spec: TableSpec) -> TableFile:
    """G6: index build, bytes per row, opening."""
    keys = TableFile.open(folder, spec).keys()
    reports = [build_index(folder, keys) for _ in range(3)]
    rate = spec.num_rows / float(np.median([r.seconds for r in reports])) / 1e6
    print(f"{'G6 index build, with fsync':<44} {rate:.1f} M rows/s  goal >= 10")
    sizes = {name: (folder / name).stat().st_size for name in ("key", "index")}
    print(f"{'G6 key + index':<44} {sum(sizes.values()) / spec.num_rows:.2f} bytes per row  goal <= 16")
    seconds = timed(lambda: TableFile.open(folder, spec))
    print(f"{'G6 opening a table':<44} {1e3 * seconds:.2f} ms  goal <= 50 (150 the first time)")
    return TableFile.open(folder, spec)


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description="The CPU look-up beside the ceilings of its machine.")
    parser.add_argument("--full", action="store_true", help="4 M rows x 128: 2 GiB")
    parser.add_argument(
        "--folder", type=Path, help="where to write the tables (default: the system's temporary folder)"
    )
    arguments = parser.parse_args()
    num_rows = 4_000_000 if arguments.full else 1_000_000
    print(f"compiling or loading the kernels: {timed(cpu.compile_kernels):.2f} s")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        generator = np.random.default_rng()
        chunks = [num_rows // 8] * 8
        write_table(
            folder / "large",
            (generator.random((n, DIM), np.float32) for n in chunks),
            keys=(generator.integers(-(2**63), 2**63 - 1, n) for n in chunks),
        )
        table = show_opening(folder / "large", TableSpec("large", "large", num_rows, DIM))
        popular = generator.permutation(num_rows)

        def uniform(count: int) -> Rows:
            return generator.integers(0, num_rows, count)

        def zipf(count: int) -> Rows:
            return popular[generator.zipf(1.05, count) % num_rows]

        compare_with_gather(table, uniform, "uniform")
        compare_with_gather(table, zipf, "Zipf 1.05")
        compare_with_searchsorted(table, uniform)
        compare_threads(table, uniform)
        compare_fused(folder, 16, 10_000)
        compare_fused(folder, 128, 10_000)


if __name__ == "__main__":
    main()
