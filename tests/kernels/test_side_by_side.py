"""Tables whose vectors stand side by side, for few and for many samples, against a dict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.kernels.cpu import lookup as cpu
from inference_session.kernels.records import SEGMENT, TABLE
from tests.testing.known_tables import make_table, segment

HELD = 50
tables_of_requests = st.lists(
    st.tuples(
        st.sampled_from([1, 3, 16, 33]),
        st.sampled_from(["float32", "float32", "float16", "int8"]),
        st.booleans(),
        st.sampled_from([np.int64, np.int32]),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=40)
@given(
    described=tables_of_requests, num_rows=st.sampled_from([1, 2, 17, 63, 64, 255, 256, 700]), seed=st.integers(0, 99)
)
def test_vectors_side_by_side_equal_a_dict(
    described: list[Any], num_rows: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Known, negative and unknown keys of both widths; unknown ones are counted and located."""
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("tables")
    width = sum(dim * per_row for dim, _, _, _, per_row in described)
    output = np.full((num_rows, width + 5), np.nan, np.float32)
    expected, known, all_keys = output.astype(np.float64), [], []
    segments, column = np.zeros(len(described), SEGMENT), 0
    positions = []
    for t, (dim, dtype, is_numbered, key_type, per_row) in enumerate(described):
        vectors = rng.normal(size=(HELD, dim)).astype(np.float32)
        held = None if is_numbered else list(range(-20, HELD - 20))
        known.append(make_table(folder / f"t{t}", held, vectors, dtype))
        keys = rng.integers(-HELD - 9, HELD + 9, (num_rows, per_row)).astype(key_type)
        all_keys.append(keys)
        segments[t] = segment(keys, output[:, column:], table=t)[0]
        for i, key in enumerate(keys.ravel().tolist()):
            vector = known[t].rows.get(key)
            begin = column + dim * (i % per_row)
            expected[i // per_row, begin : begin + dim] = known[t].default if vector is None else vector
            positions += [(t, i)] if vector is None else []
        column += dim * per_row
    counts, noted = np.full(len(segments), -7, np.int64), np.zeros(sum(map(np.size, all_keys)), np.int64)

    total = cpu.look_up(np.array([each.file.record() for each in known], TABLE), segments, counts, noted)

    np.testing.assert_allclose(output, expected, rtol=1e-6)
    assert total == len(positions)
    assert counts.tolist() == [sum(table == t for table, _ in positions) for t in range(len(described))]
    assert noted[:total].tolist() == [i for _, i in positions]
