"""Tables of every kind, and what a device answers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.records import Lookup, PoolingCode, key_segments
from inference_session.model_spec import TableSpec
from inference_session.tables.base import DeviceTables
from inference_session.tables.table_file import TableFile, write_table

SHAPES = (
    ("one_row", 1, 4, "float32", "row_number"),
    ("few_rows", 5, 1, "float32", "stored"),
    ("halves", 1000, 3, "float16", "stored"),
    ("bytes", 777, 8, "int8", "row_number"),
    ("odd_bytes", 300, 5, "int8", "stored"),
    ("wide", 2001, 128, "float32", "stored"),
    ("wider", 64, 300, "float32", "row_number"),
    ("none", 0, 4, "float32", "row_number"),
)


def specs() -> list[TableSpec]:
    """Of the tables, each in a folder of its name."""
    return [
        TableSpec(name, name, num_rows, dim, dtype=dtype, keys=keys, default_vector=(0.5,) * dim)  # type: ignore[arg-type]
        for name, num_rows, dim, dtype, keys in SHAPES
    ]


def write_files(folder: Path, seed: int = 0) -> list[TableFile]:
    """Of whose rows each GPU of several has none, one, or many."""
    rng = np.random.default_rng(seed)
    opened = []
    for spec in specs():
        numbers = np.unique(rng.integers(-(2**63), 2**63 - 1, spec.num_rows)) if spec.keys == "stored" else None
        given = None if numbers is None else [rng.permutation(numbers)]
        rows = rng.standard_normal((spec.num_rows, spec.embedding_dim), np.float32)
        write_table(folder / spec.folder, [rows], keys=given, dtype=spec.dtype)
        opened.append(TableFile.open(folder / spec.folder, spec))
    return opened


def devices_of(count: int) -> list[Any]:
    """As many as `count`, spread over the GPUs that exist."""
    import cupy

    from inference_session.device.cuda import CudaDevice

    num_gpus = cupy.cuda.runtime.getDeviceCount()
    return [CudaDevice(number % num_gpus) for number in range(count)]


def some_keys(file: TableFile, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Known ones, some of them often, negative and unknown ones."""
    n = file.spec.num_rows
    if file.spec.keys == "row_number":
        return rng.integers(-n - 2, n + 2, count)
    known = np.concatenate([np.asarray(file.keys()), [2**63 - 1, -1, 0]])
    return np.asarray(rng.choice(known, count), np.int64)


def answers(tables: DeviceTables, files: list[TableFile], keys: list[NDArray[np.int64]], pooling: PoolingCode) -> Any:
    """One look-up in all tables: the vectors, and unknown keys, of each. Bags have four keys."""
    bag = 1 if pooling == PoolingCode.NONE else 4
    device = tables.device
    with device.request():
        staged = [device.stage(each) for each in keys]
        outputs = [
            device.output(np.zeros((len(k) // bag, f.spec.embedding_dim), np.float32))
            for k, f in zip(keys, files, strict=True)
        ]
        segments = key_segments([each.reshape(-1, bag) for each in staged], outputs, pooling=pooling)
        num_keys = np.array([len(each) for each in keys])
        lookup = Lookup(segments, num_keys, device.counts(len(keys)), tables.prepare(segments))
        tables.look_up(lookup)
        device.wait()
        return [output.copy() for output in outputs], lookup.num_unknown.copy()
