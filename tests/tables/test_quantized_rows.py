"""Rows in float16 and int8, held against slow arithmetic in float64; and FBGEMM's rows, against plain Python."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inference_session.errors import ModelFormatError
from inference_session.model_spec import TableSpec
from inference_session.tables.quantized_rows import (
    LARGEST_INT8,
    dequantize_int8,
    dequantize_rows,
    from_fbgemm,
    quantize_int8,
    quantize_rows,
    to_fbgemm,
)
from inference_session.tables.table_file import TableFile, write_table


def rows_up_to(largest: float) -> st.SearchStrategy[np.ndarray]:
    """float32 [1 to 5, 1 to 40]."""
    elements = st.floats(width=32, min_value=-largest, max_value=largest)
    return arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=elements)


finite_rows = rows_up_to(LARGEST_INT8)


@given(finite_rows)
def test_int8_vectors_keep_their_error_bound(vectors: np.ndarray) -> None:
    """Half a step of (max - min) / 255 of the row, plus float32 rounding of its largest element."""
    exact = vectors.astype(np.float64)
    error = np.abs(dequantize_int8(quantize_int8(vectors)) - exact)
    span = exact.max(axis=1) - exact.min(axis=1)
    bound = span / 510 + np.abs(exact).max(axis=1) * 2.0**-21 + 1e-42
    assert (error <= bound[:, None]).all()
    constant = np.repeat(vectors[:, :1], 7, axis=1)
    np.testing.assert_array_equal(dequantize_int8(quantize_int8(constant)), constant)


@given(rows_up_to(65504))
def test_float16_vectors_keep_their_error_bound(vectors: np.ndarray) -> None:
    """Half a step of float16: 2^-11 of the element, 2^-25 near zero."""
    exact = vectors.astype(np.float64)
    error = np.abs(dequantize_rows(quantize_rows(vectors, "float16"), "float16") - exact)
    assert (error <= np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25)).all()


@pytest.mark.parametrize("scale", [0, 1e-45, 1e-38, 1, 1e30, LARGEST_INT8])
def test_rows_of_any_magnitude_are_looked_up(scale: float, tmp_path: Path) -> None:
    """Rows of zeros, of denormal numbers and of the largest ones: a look-up answers what `dequantize_int8` says."""
    vectors = (np.array([[-1, 1, 0.5, 0.25], [1, 1, 1, 1], [0, 0, 0, 0], [-1, -1, -1, 1]]) * scale).astype(np.float32)
    write_table(tmp_path, [vectors], dtype="int8")
    file = TableFile.open(tmp_path, TableSpec("t", "t", 4, 4, "int8", "row_number"))
    found = np.empty((4, 4), np.float32)
    assert file.fetch(np.arange(4), found).all()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, dequantize_int8(quantize_int8(vectors)), rtol=1e-6, atol=1e-42)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
def test_what_int8_cannot_hold_is_refused(bad: float) -> None:
    """One such element in one row; float32 keeps all of them."""
    vectors = np.ones((3, 4), np.float32)
    vectors[1, 2] = bad
    with pytest.raises(ModelFormatError, match="which int8 cannot store; use float32"):
        quantize_int8(vectors)
    np.testing.assert_array_equal(quantize_rows(vectors, "float32"), vectors)


def test_float16_keeps_nan_and_infinities_and_refuses_what_overflows() -> None:
    """No finite element becomes infinite."""
    special = np.array([[np.nan, np.inf, -np.inf, 65504]], np.float32)
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(special, "float16"), "float16"), special)
    with pytest.raises(ModelFormatError, match=r"range of float16 \(65504\)"):
        quantize_rows(np.array([[65520.0]]), "float16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_no_rows_are_no_rows(dtype: str) -> None:
    """The number of columns stays."""
    rows = quantize_rows(np.empty((0, 3), np.float32), dtype)  # type: ignore[arg-type]
    assert dequantize_rows(rows, dtype).shape == (0, 3)  # type: ignore[arg-type]


def fbgemm_row(vector: list[float]) -> bytes:
    """FBGEMM's fused 8-bit row of a vector, element by element."""
    low, high = min(vector), max(vector)
    scale = (high - low) / 255
    elements = [round((value - low) / scale) if scale else 0 for value in vector]
    return bytes(elements) + struct.pack("<ff", scale, low)


def fbgemm_values(row: bytes) -> list[Fraction]:
    """What such a row stands for, exactly."""
    scale, bias = map(Fraction, struct.unpack("<ff", row[-8:]))
    return [scale * element + bias for element in row[:-8]]


fbgemm_vectors = st.lists(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=5
)


@given(fbgemm_vectors)
def test_rows_of_fbgemm_are_read(vectors: list[list[float]]) -> None:
    """An int8 table answers what they stand for, but for float32 rounding."""
    rows = [fbgemm_row(vector) for vector in vectors]
    ours = from_fbgemm(np.array([list(row) for row in rows], np.uint8))
    for row, vector in zip(rows, dequantize_int8(ours), strict=True):
        exact = np.array([float(value) for value in fbgemm_values(row)])
        np.testing.assert_allclose(vector, exact, rtol=0, atol=np.abs(exact).max() * 2.0**-21 + 1e-42)


@given(finite_rows)
def test_rows_are_written_as_fbgemm_writes_them(vectors: np.ndarray) -> None:
    """They stand for the same values, but for float32 rounding; elements and scales come back exactly."""
    ours = quantize_int8(vectors)
    theirs = to_fbgemm(ours)
    for row, vector in zip(theirs, dequantize_int8(ours).astype(np.float64), strict=True):
        exact = np.array([float(value) for value in fbgemm_values(row.tobytes())])
        np.testing.assert_allclose(exact, vector, rtol=0, atol=np.abs(vector).max() * 2.0**-21 + 1e-42)
    np.testing.assert_array_equal(from_fbgemm(theirs)[:, :-4], ours[:, :-4])


@pytest.mark.parametrize(("scale", "bias"), [(np.nan, 0), (1, np.nan), (1, np.inf), (3e38, 0), (1e36, 3.4e38)])
def test_rows_of_fbgemm_that_would_overflow_are_refused(scale: float, bias: float) -> None:
    """A scale or a bias that is NaN, infinite or too large."""
    row = np.frombuffer(bytes([1, 2, 3]) + struct.pack("<ff", scale, bias), np.uint8)[None]
    with pytest.raises(ModelFormatError, match="NaN or too large"):
        from_fbgemm(row)
