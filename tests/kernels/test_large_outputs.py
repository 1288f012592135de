"""Look-ups whose output is larger than what the caches keep: written past them where it begins at a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference_session.device.host import LINE_BYTES, vectors_at_line
from inference_session.kernels.cpu.stream import PAST_CACHES_BYTES
from inference_session.kernels.records import address_of
from inference_session.model_spec import TableSpec
from inference_session.tables.table_file import TableFile, write_table

NUM_ROWS = 3000


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dim", [16, 128, 130, 512])
@pytest.mark.parametrize("is_hashed", [True, False])
def test_large_outputs(tmp_path: Path, is_hashed: bool, dim: int, offset: int) -> None:
    """Every vector is in its place, unknown keys leave theirs unchanged, and nothing is written outside the output."""
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((NUM_ROWS, dim), np.float32)
    known = rng.permutation(NUM_ROWS) * 1000 - 500_000 if is_hashed else np.arange(NUM_ROWS)
    write_table(tmp_path, [vectors], keys=[known] if is_hashed else None)
    table = TableFile.open(tmp_path, TableSpec("t", "t", NUM_ROWS, dim, keys="stored" if is_hashed else "row_number"))
    num_keys = PAST_CACHES_BYTES // (4 * dim) + 37
    rows = rng.integers(0, NUM_ROWS, num_keys)
    keys = known[rows].astype(np.int64)
    is_known = rng.random(num_keys) > 0.1
    keys[~is_known] = 10**12
    memory = vectors_at_line(num_keys + 2, dim).reshape(-1)
    memory[:] = -1
    out = memory[offset : offset + num_keys * dim].reshape(num_keys, dim)

    found = table.fetch(keys, out)

    assert (address_of(out) % LINE_BYTES == 0) == (offset == 0)
    np.testing.assert_array_equal(found, is_known)
    np.testing.assert_array_equal(out, np.where(is_known[:, None], vectors[rows], np.float32(-1)))
    assert (memory[:offset] == -1).all()
    assert (memory[offset + num_keys * dim :] == -1).all()


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 5), (1000, 16)])
def test_vectors_at_line(shape: tuple[int, int]) -> None:
    """Memory for vectors begins at a cache line, and has its full size."""
    array = vectors_at_line(*shape)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert address_of(array) % LINE_BYTES == 0
    array[:] = 1
