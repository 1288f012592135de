"""The records that describe one request to the look-up kernels; both twins (cpu/lookup.py, cuda/launch.py) read them.

A request is an array of `SEGMENT` records over an array of `TABLE` records: any number of tables, one call.
Addresses are plain integers, so that one compiled kernel serves every model; the code that fills a record keeps the
arrays behind its addresses alive until the call returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES, FLOAT_BYTES = 8, 4
"""Of a key, int64, and of an element of a vector, float32."""


class VectorCode(IntEnum):
    """How a table stores its vectors."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2
    """Row-wise: embedding_dim int8 elements, then float32 scale, float32 bias; value = scale * element + bias."""


class PoolingCode(IntEnum):
    """What becomes of the vectors of one row of keys."""

    NONE = 0
    """They stand side by side."""
    SUM = 1
    MEAN = 2
    MAX = 3


MAX_MARK = 3
"""Hits that a cache remembers of a row; a row with as many is not written to, so that readers do not fight over it."""

TABLE = np.dtype(
    [
        ("index_address", np.int64),  # hash index (hash_index.py), at a cache line; 0: keys are row numbers
        ("num_buckets", np.int64),  # of the index, at least 1
        (
            "keys_address",
            np.int64,
        ),  # int64[num_rows], the key of each row; 0: they are row numbers, negative ones from the end
        ("vectors_address", np.int64),
        ("row_bytes", np.int64),  # distance between two rows
        ("num_rows", np.int64),
        ("embedding_dim", np.int64),
        ("vector_code", np.int64),  # VectorCode
        (
            "default_address",
            np.int64,
        ),  # float32[embedding_dim], the answer for an unknown key; 0: leave the output as it is
        ("next_table", np.int64),  # record to try where the key is not here; -1: none
        ("marks_address", np.int64),  # uint8[num_rows], raised up to MAX_MARK by every hit; 0: hits leave no mark
    ]
)

SEGMENT = np.dtype(
    [
        ("table", np.int64),  # record to begin with
        ("keys_address", np.int64),
        ("key_bytes", np.int64),  # 8 or 4: int64 or int32
        ("row_stride", np.int64),  # bytes from one row of keys to the next
        ("key_stride", np.int64),  # bytes from one key of a row to the next
        ("num_rows", np.int64),  # rows of the output
        ("keys_per_row", np.int64),  # where begins_address is 0
        ("begins_address", np.int64),  # int64[num_rows], position of the first key of each row; 0: fixed length
        ("ends_address", np.int64),  # int64[num_rows], position behind the last key of each row
        ("weights_address", np.int64),  # float32, one per key, laid out contiguously as [row, key]; 0: none
        ("pooling", np.int64),  # PoolingCode
        ("output_address", np.int64),
        ("output_stride", np.int64),  # bytes from one row of the output to the next
        ("output_code", np.int64),  # VectorCode of the output: FLOAT32, or on a GPU FLOAT16
    ],
    align=True,  # as C lays out a record that holds it
)

VECTOR_COPY = np.dtype(
    [
        ("vector_address", np.int64),  # float32[embedding_dim]
        ("output_address", np.int64),
        ("embedding_dim", np.int64),
        ("output_code", np.int64),  # VectorCode of the output: FLOAT32 or FLOAT16
    ]
)


@dataclass(slots=True)
class Lookup:
    """One look-up in all tables of a model. The code that fills it keeps alive what its segments point to."""

    segments: NDArray[np.void]
    """SEGMENT records."""
    num_keys: NDArray[np.int64]
    """Keys of each segment."""
    num_unknown: NDArray[np.int64]
    """Zeros at first; receives the keys of each segment that were answered with the default vector."""
    prepared: object | None = None
    """What the reader of rows keeps for look-ups of these shapes; None: nothing."""
    repeat: Callable[[], None] | None = None
    """Launches this look-up once more, over whatever is in its memory by then; None: it is not one that is repeated."""
    missing_positions: NDArray[np.int64] | None = None
    """Noted by a cache that lacks some of the keys: where they are, as `kernels.cpu.lookup` says. A GPU's cache notes
    nothing where keys are pooled."""
    places: tuple[int, int, int, int, int] | None = None
    """What `find_places` returns, where the arrays stay for many look-ups; None: they do not."""
    copied_keys: NDArray[np.int64] | None = None
    """Kept alive here: keys that segments point to, and that had to be copied."""

    def find_places(self) -> tuple[int, int, int, int, int]:
        """Where the arrays are, for compiled code: addresses of segments, num_keys and num_unknown, bytes from one of
        num_unknown to the next, and their number.
        """
        unknown = self.num_unknown
        addresses = address_of(self.segments), address_of(self.num_keys), address_of(unknown)
        return *addresses, unknown.strides[0], len(unknown)


def table_record(
    vectors: NDArray[Any],
    embedding_dim: int,
    *,
    code: VectorCode = VectorCode.FLOAT32,
    keys: NDArray[np.int64] | None = None,
    index_address: int = 0,
    num_buckets: int = 0,
    marks: NDArray[np.uint8] | None = None,
    default_address: int = 0,
    next_table: int = -1,
) -> np.void:
    """A TABLE record of rows [num_rows, …]. Without `keys` and index they are known by their numbers."""
    record: np.void = np.zeros(1, TABLE)[0]
    record["index_address"], record["num_buckets"] = index_address, num_buckets
    record["keys_address"] = 0 if keys is None else address_of(keys)
    record["vectors_address"], record["row_bytes"] = address_of(vectors), vectors.strides[0]
    record["num_rows"], record["embedding_dim"], record["vector_code"] = len(vectors), embedding_dim, code
    record["default_address"], record["next_table"] = default_address, next_table
    record["marks_address"] = 0 if marks is None else address_of(marks)
    return record


_OF_KEYS = "keys_address", "key_bytes", "row_stride", "key_stride", "num_rows", "keys_per_row"


def key_segments(
    keys: Sequence[Any],
    outputs: Sequence[Any],
    tables: Sequence[int] | None = None,
    pooling: PoolingCode = PoolingCode.NONE,
) -> NDArray[np.void]:
    """A SEGMENT record for each array of keys: int64 or int32 [rows], or [rows, keys of a row], of any strides.

    Args:
        keys: the arrays.
        outputs: receive the vectors: float32 [rows, …] for each array of keys.
        tables: the record to begin with, for each array of keys; None: 0, 1, …
        pooling: of the vectors of a row.
    """
    segments = np.zeros(len(keys), SEGMENT)
    segments["pooling"] = pooling
    # A view of what is set: to set all fields at once takes half of the time.
    described = segments[["table", *_OF_KEYS, "output_address", "output_stride"]]
    for i, (k, output) in enumerate(zip(keys, outputs, strict=True)):
        of_keys = address_of(k), k.itemsize, k.strides[0], k.strides[-1], len(k), math.prod(k.shape[1:])
        described[i] = (i if tables is None else tables[i], *of_keys, address_of(output), output.strides[0])
    return segments


def address_of(array: Any) -> int:
    """Where the elements of an array begin, NumPy's or CuPy's."""
    if isinstance(array, np.ndarray):
        # Not by __array_interface__, which also describes the fields of a record: that takes ten times as long.
        return int(array.ctypes.data)
    return int(array.data.ptr)
