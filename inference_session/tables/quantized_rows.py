"""Rows in float16 and int8: how a table stores them, and FBGEMM's format of 8-bit rows.

An int8 row is `dim` int8 elements, then float32 scale = (max - min) / 255 and float32 bias = min + 128 * scale of that
row, little endian. It stands for scale * element + bias.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import ModelFormatError
from inference_session.model_spec import SCALE_AND_BIAS_BYTES, VectorType

LARGEST_INT8 = float(np.finfo(np.float32).max) / 2
"""The largest magnitude in an int8 row: a look-up computes scale * element in float32, which must not overflow."""
_LARGEST_SCALE = 2 * LARGEST_INT8 / 254  # that of the widest row, and float32 rounding
_SIGN_BIT = 0x80
_OFFSET = 128


def quantize_rows(vectors: NDArray[np.floating], dtype: VectorType) -> NDArray[np.generic]:
    """Rows as a table of that type stores them: [n, dim] floats → float32 or float16 [n, dim], or uint8 [n, dim + 8].

    Raises:
        ModelFormatError: the type cannot hold an element. float16 holds NaN and infinities, int8 does not.
    """
    if dtype == "int8":
        return quantize_int8(vectors)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(vectors, dtype)
    if dtype == "float16" and not np.array_equal(np.isfinite(stored), np.isfinite(vectors)):
        raise ModelFormatError("vectors contain an element outside the range of float16 (65504); use float32")
    return stored


def dequantize_rows(rows: NDArray[np.generic], dtype: VectorType) -> NDArray[np.float32]:
    """The vectors that stored rows stand for: what `quantize_rows` returns → float32 [n, dim]."""
    if dtype == "int8":
        return dequantize_int8(cast("NDArray[np.uint8]", rows))
    return np.ascontiguousarray(rows, np.float32)


def quantize_int8(vectors: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Rows as an int8 table stores them: [n, dim] finite floats → uint8 [n, dim + 8].

    What `dequantize_int8` and a look-up return is off by at most half a scale, (max - min) / 510, plus float32
    rounding: 2^-21 of the largest magnitude in the row. A row of equal elements comes back exactly.

    Raises:
        ModelFormatError: an element is NaN, infinite or beyond LARGEST_INT8.
    """
    exact = np.asarray(vectors, np.float32)
    if not (np.abs(exact) <= LARGEST_INT8).all():
        raise ModelFormatError(
            f"vectors hold an element that is NaN, infinite or beyond {LARGEST_INT8:.3g}, which int8 cannot store; "
            "use float32"
        )
    low, high = (edge.astype(np.float64) for edge in (exact.min(axis=1), exact.max(axis=1)))
    rows = np.empty((len(exact), exact.shape[1] + SCALE_AND_BIAS_BYTES), np.uint8)
    scale = ((high - low) / 255).astype(np.float32)
    bias = (low + _OFFSET * scale.astype(np.float64)).astype(np.float32)
    _write_factors(rows, scale, bias)
    steps = exact - bias[:, None]
    np.divide(steps, scale[:, None], out=steps, where=scale[:, None] > 0)
    rows[:, :-SCALE_AND_BIAS_BYTES].view(np.int8)[...] = np.clip(np.rint(steps, out=steps), -128, 127, out=steps)
    return rows


def dequantize_int8(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The vectors that rows of an int8 table stand for: uint8 [n, dim + 8] → float32 [n, dim]."""
    scale, bias = _factors(rows)
    return rows[:, :-SCALE_AND_BIAS_BYTES].view(np.int8) * scale[:, None] + bias[:, None]


def to_fbgemm(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows of an int8 table in FBGEMM's fused 8-bit row-wise format, uint8 [n, dim + 8] both.

    FBGEMM's row is `dim` uint8 elements, then float32 scale and float32 bias = min, for scale * element + bias.
    Elements and scales are the same, the bias is off by float32 rounding.
    """
    return _moved(rows, -_OFFSET)


def from_fbgemm(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rows [n, row_bytes] of an int8 table from those of FBGEMM: the way back from `to_fbgemm`.

    Raises:
        ModelFormatError: a scale or bias is NaN, infinite or so large that a look-up would overflow.
    """
    scale, _ = _factors(rows)
    moved = _moved(rows, _OFFSET)
    if not ((np.abs(scale) <= _LARGEST_SCALE) & np.isfinite(_factors(moved)[1])).all():
        raise ModelFormatError("an FBGEMM row has a scale or a bias that is NaN or too large for an int8 table")
    return moved


def _moved(rows: NDArray[np.uint8], steps: int) -> NDArray[np.uint8]:
    """The same rows with elements of the other sign convention, and the bias moved by this many scales."""
    scale, bias = _factors(rows)
    moved: NDArray[np.uint8] = rows ^ np.uint8(_SIGN_BIT)
    with np.errstate(over="ignore", invalid="ignore"):
        _write_factors(moved, scale, (bias + steps * scale.astype(np.float64)).astype(np.float32))
    return moved


def _factors(rows: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scale and bias of each row, float32 [n]."""
    factors = np.ascontiguousarray(rows[:, -SCALE_AND_BIAS_BYTES:]).view("<f4")
    return factors[:, 0], factors[:, 1]


def _write_factors(rows: NDArray[np.uint8], scale: NDArray[np.float32], bias: NDArray[np.float32]) -> None:
    factors = np.stack([scale, bias], axis=1).astype("<f4")
    rows[:, -SCALE_AND_BIAS_BYTES:] = factors.view(np.uint8)
