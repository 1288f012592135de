"""Look-ups in arrays that guarded pages surround. Run as a program, which ends with 0 if all answers are right."""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import SEGMENT, TABLE, PoolingCode
from tests.testing.guarded import guarded
from tests.testing.known_tables import KnownTable, make_table, segment

NUM_ROWS = 50
COUNTS = (*range(1, 10), 63, 64, 65, 255, 256, 257, 601)


def main() -> None:
    """Tables of both kinds, rows of several widths and types, keys of both types, few keys and many."""
    with tempfile.TemporaryDirectory() as folder:
        cases = itertools.product((True, False), (1, 4, 19, 75), ("float32", "float16", "int8"))
        for number, (has_index, dim, dtype) in enumerate(cases):
            rng = np.random.default_rng(number)
            vectors = rng.standard_normal((NUM_ROWS, dim), np.float32)
            keys = list(range(-20, NUM_ROWS - 20)) if has_index else None
            table = make_table(Path(folder) / str(number), keys, vectors, dtype)
            for count, at_end in itertools.product(COUNTS, (True, False)):
                look_up(table, rng, count, at_end)


def look_up(table: KnownTable, rng: np.random.Generator, count: int, at_end: bool) -> None:
    """Single keys and bags of keys, known and unknown ones, in all segments of a look-up."""
    dim = len(table.default)
    record = guarded(np.array([table.file.record()], TABLE), at_end=at_end)
    segments, outputs, expected = [], [], []
    for keys_per_row, pooling in ((1, PoolingCode.NONE), (1, PoolingCode.NONE), (3, PoolingCode.SUM)):
        kind = rng.choice([np.int32, np.int64])
        keys = guarded(rng.integers(-60, 60, (count, keys_per_row)).astype(kind), at_end=at_end)
        output = guarded(np.full((count, dim), np.nan, np.float32), at_end=at_end)
        segments.append(segment(keys, output, pooling=pooling))
        outputs.append(output)
        expected.append(answers(table, keys).sum(axis=1))
    num_keys = 5 * count
    counts, positions = (guarded(np.zeros(n, np.int64), at_end=at_end) for n in (3, num_keys))
    records = guarded(np.concatenate(segments).astype(SEGMENT), at_end=at_end)
    cpu.look_up(record, records, counts, positions)
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-4)


def answers(table: KnownTable, keys: NDArray[Any]) -> NDArray[np.float64]:
    """[rows, keys per row, dim]"""
    return np.array([[table.rows.get(int(key), table.default) for key in row] for row in keys])


if __name__ == "__main__":
    main()
    sys.exit(0)
