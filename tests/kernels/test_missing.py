"""What a GPU's look-up has noted, and the copies of missing vectors: compiled code against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inference_session.kernels.cpu.missing import describe_copies, find_positions
from inference_session.kernels.records import VECTOR_COPY, VectorCode
from tests.testing.missed_rows import missed_rows


@given(
    tiles=st.lists(st.lists(st.sets(st.integers(0, 31)), max_size=4), max_size=6),
    keys_per_tile=st.sampled_from([4, 8, 32]),
)
def test_positions_are_those_of_the_bits(tiles: list[list[set[int]]], keys_per_tile: int) -> None:
    """Segment after segment, tile after tile, from the lowest bit on. They are zeros then, for the next look-up."""
    segments = [[{bit for bit in bits if bit < keys_per_tile} for bits in each] for each in tiles]
    bits = np.array([sum(1 << bit for bit in bits) for each in segments for bits in each], np.uint32)
    first_tiles = np.cumsum([0, *map(len, segments)]).astype(np.uint32)
    counts, positions = np.full(len(segments), -1), np.empty(keys_per_tile * len(bits), np.int64)
    num_found = find_positions(bits, first_tiles, keys_per_tile, counts, positions)

    expected = [[keys_per_tile * i + bit for i, bits in enumerate(each) for bit in sorted(bits)] for each in segments]
    assert counts.tolist() == [len(each) for each in expected]
    assert not bits.any()
    assert positions[:num_found].tolist() == [position for each in expected for position in each]


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(-3, 3), max_size=12)), min_size=1, max_size=5),
    keys_per_row=st.integers(1, 3),
    code=st.sampled_from([VectorCode.FLOAT32, VectorCode.FLOAT16]),
    moved=st.sampled_from([0, 4096, -64]),
)
def test_copies_go_where_the_look_up_would_have_written(
    rows: list[tuple[int, list[int]]], keys_per_row: int, code: VectorCode, moved: int
) -> None:
    """Each position's vector is read where its key's row is, and written into its place in its row of the output."""
    keys = [np.array(asked, np.int64) for _, asked in rows]
    missed = missed_rows([dim for dim, _ in rows], keys)
    segments, element_bytes = missed.segments, 2 if code == VectorCode.FLOAT16 else 4
    segments["keys_per_row"], segments["output_code"], segments["output_stride"] = keys_per_row, code, 1000
    segments["output_address"] = 10**6 * np.arange(1, len(rows) + 1)
    copies = np.zeros(len(missed.positions), VECTOR_COPY)
    overlay = missed.records, missed.row_numbers
    describe_copies(segments, missed.counts, missed.positions, *overlay, moved, copies)

    expected = []
    for t, (dim, asked) in enumerate(rows):
        for position, key in enumerate(asked):
            vectors = missed.by_table[t]
            row = vectors.vectors[vectors.keys.tolist().index(key)]
            place = position // keys_per_row * 1000 + position % keys_per_row * dim * element_bytes
            expected.append((row.ctypes.data + moved, 10**6 * (t + 1) + place, dim, int(code)))
    assert copies.tolist() == expected
