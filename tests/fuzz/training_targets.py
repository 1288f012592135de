"""Readers of training data, for environments with PyTorch and pyarrow."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from hotrow.training.hugectr import tools
from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t
from inference_session.errors import HotrowError
from tests.fuzz.target import Target
from tests.testing.hugectr_training_records import Records, make_records, samples_of, shape, source

_SHAPE = shape(1, 2, (2, 2), (1, 1))
_SMALL_SHAPE = shape(1, 2, (2, 1), key_bytes=4)
_ERRORS = (HotrowError, OSError)
"""A damaged list names other files, which cannot be read."""


def _norm(folder: Path, *, is_checked: bool) -> list[Path]:
    records = _records()
    path = folder / "0.data"
    tools.write_norm(
        path, records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=is_checked
    )
    tools.write_file_list(folder / "list.txt", [path])
    return [path, folder / "list.txt"]


def _raw(folder: Path) -> list[Path]:
    records = make_records(np.random.default_rng(0), 40, _SMALL_SHAPE, limit=10, is_fixed=True)
    tools.write_raw(
        folder / "0.bin", records.labels, records.dense, [bags.keys for bags in records.slots], is_float=True
    )
    return [folder / "0.bin"]


def _parquet(folder: Path) -> list[Path]:
    """The Parquet file itself is read by pyarrow."""
    records = _records()
    path = folder / "0.parquet"
    tools.write_parquet(path, records.labels, records.dense, records.slots, rows_per_group=7)
    params = tools.DataGeneratorParams(DataReaderType_t.Parquet, 1, 2, 3, True, "", "", (10, 10, 10))
    tools.write_metadata(folder, {path: len(records.labels)}, params)
    tools.write_file_list(folder / "list.txt", [path])
    return [folder / "_metadata.json", folder / "list.txt"]


def _records() -> Records:
    return make_records(np.random.default_rng(0), 40, _SHAPE, limit=10)


def _read_lists(folder: Path, kind: DataReaderType_t, *, is_checked: bool = False) -> None:
    check = Check_t.Sum if is_checked else Check_t.Non
    for block in source(folder / "list.txt", _SHAPE, kind, check=check).blocks():
        assert len(samples_of(block, _SHAPE)) == len(block)


def _read_raw(folder: Path) -> None:
    for num_samples in (0, 40):
        reader = source(
            folder / "0.bin", _SMALL_SHAPE, DataReaderType_t.Raw, num_samples=num_samples, float_label_dense=True
        )
        for block in reader.blocks():
            assert len(samples_of(block, _SMALL_SHAPE)) == len(block)


TARGETS = {
    "norm_records": Target(
        partial(_norm, is_checked=False), partial(_read_lists, kind=DataReaderType_t.Norm), errors=_ERRORS
    ),
    "checked_norm_records": Target(
        partial(_norm, is_checked=True),
        partial(_read_lists, kind=DataReaderType_t.Norm, is_checked=True),
        errors=_ERRORS,
    ),
    "raw_records": Target(_raw, _read_raw, errors=_ERRORS),
    "parquet_metadata": Target(_parquet, partial(_read_lists, kind=DataReaderType_t.Parquet), errors=_ERRORS),
}
