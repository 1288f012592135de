"""Tables whose answers are known, and records of look-ups in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.records import key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.quantized_rows import dequantize_int8
from inference_session.tables.table_file import TableFile, write_table


@dataclass
class KnownTable:
    """A table, and what it should answer."""

    file: TableFile
    rows: dict[int, NDArray[np.float64]]
    default: NDArray[np.float64]


def make_table(folder: Path, keys: list[int] | None, vectors: NDArray[Any], dtype: Any = "float32") -> KnownTable:
    """Write and open a table; its oracle holds the stored vectors, widened."""
    key_chunks = None if keys is None else [np.array(keys, np.int64)]
    write_table(folder, [vectors], keys=key_chunks, dtype=dtype)
    dim = vectors.shape[1]
    default = tuple(float(i) + 0.5 for i in range(dim))
    kind: Literal["row_number", "stored"] = "row_number" if keys is None else "stored"
    spec = TableSpec("t", "t", len(vectors), dim, dtype, kind, default_vector=default)
    file = TableFile.open(folder, spec)
    stored = dequantize_int8(file.vectors) if dtype == "int8" else file.vectors  # type: ignore[arg-type]
    rows = dict(zip(keys or range(len(vectors)), np.asarray(stored, np.float64), strict=True))
    if keys is None:
        rows |= {row - len(vectors): vector for row, vector in list(rows.items())}
    return KnownTable(file, rows, np.array(default))


def segment(keys: NDArray[Any], output: NDArray[np.float32], **fields: int) -> NDArray[np.void]:
    """A segment for keys [rows, keys per row] of any strides."""
    record = key_segments([keys], [output])
    for name, value in fields.items():
        record[name] = value
    return record
