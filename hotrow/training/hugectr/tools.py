"""`hugectr.tools`: synthetic training data in HugeCTR's formats, and the writers of these formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from hotrow.training.hugectr.readers.block import Bags
from hotrow.training.hugectr.readers.norm import HEADER
from inference_session.errors import ConfigurationError

_EXPONENTS = {PowerLaw_t.Long: 0.9, PowerLaw_t.Medium: 1.1, PowerLaw_t.Short: 1.3}


@dataclass
class DataGeneratorParams:
    """The data to generate, and where it is written."""

    format: DataReaderType_t
    label_dim: int
    dense_dim: int
    num_slot: int
    i64_input_key: bool
    source: str
    eval_source: str
    slot_size_array: Sequence[int]
    nnz_array: Sequence[int] = field(default_factory=list)
    check_type: Check_t = Check_t.Sum
    dist_type: Distribution_t = Distribution_t.PowerLaw
    power_law_type: PowerLaw_t = PowerLaw_t.Specific
    alpha: float = 1.2
    num_files: int = 128
    eval_num_files: int = 32
    num_samples_per_file: int = 40960
    num_samples: int = 5242880
    eval_num_samples: int = 1310720
    float_label_dense: bool = False

    def __post_init__(self) -> None:
        self.nnz_array = list(self.nnz_array) or [1] * self.num_slot
        for name in ("slot_size_array", "nnz_array"):
            if len(getattr(self, name)) != self.num_slot:
                raise ConfigurationError(
                    f"DataGeneratorParams: {name} has {len(getattr(self, name))} elements for {self.num_slot} slots"
                )

    @property
    def exponent(self) -> float:
        """The exponent of the power law; 0: uniform."""
        if self.dist_type is Distribution_t.Uniform:
            return 0.0
        return _EXPONENTS.get(self.power_law_type, self.alpha)


class DataGenerator:
    """Writes training and evaluation data. Labels follow from the keys, so that a model has something to learn."""

    def __init__(self, data_generator_params: DataGeneratorParams) -> None:
        self._params = data_generator_params
        self._random = np.random.default_rng(0)
        self._key_type = np.dtype("<i8" if data_generator_params.i64_input_key else "<u4")

    def generate(self) -> None:
        """Write both data sets; OSError where that is not possible."""
        params = self._params
        if params.format is DataReaderType_t.Raw:
            for place, count in ((params.source, params.num_samples), (params.eval_source, params.eval_num_samples)):
                Path(place).parent.mkdir(parents=True, exist_ok=True)
                self._write_raw(Path(place), count)
            return
        for place, folder, count in (
            (params.source, "train", params.num_files),
            (params.eval_source, "val", params.eval_num_files),
        ):
            self._write_files(Path(place), Path(place).parent / folder, count)

    def _write_files(self, file_list: Path, folder: Path, num_files: int) -> None:
        params = self._params
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "data" if params.format is DataReaderType_t.Norm else "parquet"
        paths = [folder / f"gen_{i}.{suffix}" for i in range(num_files)]
        for path in paths:
            labels, dense, keys = self._records(params.num_samples_per_file)
            if params.format is DataReaderType_t.Norm:
                is_checked = params.check_type is Check_t.Sum
                slots = self._of_all_slots(keys)
                write_norm(path, labels, dense, slots, key_type=self._key_type, is_checked=is_checked)
            else:
                write_parquet(path, labels, dense, keys)
        if params.format is DataReaderType_t.Parquet:
            write_metadata(folder, dict.fromkeys(paths, params.num_samples_per_file), params)
        write_file_list(file_list, paths)

    def _write_raw(self, path: Path, num_samples: int) -> None:
        labels, dense, keys = self._records(num_samples)
        write_raw(path, labels, dense, self._of_all_slots(keys), is_float=self._params.float_label_dense)

    def _of_all_slots(self, keys: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Keys that count per slot, each behind those of the slots before it."""
        offsets = np.cumsum([0, *self._params.slot_size_array[:-1]])
        return [column + offset for column, offset in zip(keys, offsets, strict=True)]

    def _records(self, num_samples: int) -> tuple[NDArray[np.float32], NDArray[np.float32], list[NDArray[np.int64]]]:
        params = self._params
        keys = [
            self._keys(num_samples, size, nnz)
            for size, nnz in zip(params.slot_size_array, params.nnz_array, strict=True)
        ]
        dense = self._random.random((num_samples, params.dense_dim))
        if params.format is DataReaderType_t.Raw and not params.float_label_dense:
            dense = np.floor(dense * 3)
        waves = [np.sin(column * (1.0 + slot)).sum(axis=1) for slot, column in enumerate(keys)]
        taste = sum(waves, np.zeros(num_samples)) / np.sqrt(sum(params.nnz_array))
        chance = 1.0 / (1.0 + np.exp(-3.0 * taste))
        labels = self._random.random((num_samples, params.label_dim)) < chance[:, np.newaxis]
        return labels.astype(np.float32), dense.astype(np.float32), keys

    def _keys(self, num_samples: int, size: int, nnz: int) -> NDArray[np.int64]:
        drawn = self._random.random((num_samples, nnz))
        exponent = self._params.exponent
        if exponent == 0.0 or abs(exponent - 1.0) < 1e-6:
            return (drawn * size).astype(np.int64)
        rest = 1.0 - exponent
        ranks = (drawn * ((size + 1.0) ** rest - 1.0) + 1.0) ** (1.0 / rest) - 1.0
        return np.clip(ranks.astype(np.int64), 0, size - 1)


def write_file_list(path: Path, files: Sequence[Path]) -> None:
    """A file list of the formats Norm and Parquet."""
    path.write_text("\n".join([str(len(files)), *map(str, files)]) + "\n", encoding="utf-8")


def write_norm(
    path: Path,
    labels: NDArray[np.float32],
    dense: NDArray[np.float32],
    slots: Sequence[NDArray[np.int64] | Bags],
    *,
    key_type: np.dtype[np.generic],
    is_checked: bool,
) -> None:
    """A file of the Norm format.

    Args:
        slots: by slot, keys [samples, keys of each], or bags of different sizes.
        key_type: uint32 or int64, little endian.
    """
    header = np.zeros(1, HEADER)
    header[["error_check", "number_of_records", "label_dim", "dense_dim", "slot_num"]] = (
        int(is_checked), len(labels), labels.shape[1], dense.shape[1], len(slots),
    )  # fmt: skip
    columns = [(bags.keys, np.diff(bags.offsets)) for bags in map(_as_bags, slots)]
    head = np.concatenate([labels, dense], axis=1).astype("<f4")
    counts = np.stack([count for _, count in columns], axis=1).astype("<i4")
    lengths = head.shape[1] * 4 + 4 * len(slots) + counts.sum(axis=1) * key_type.itemsize
    begins = np.cumsum([0, *(lengths + (5 if is_checked else 0))])
    data = np.zeros(begins[-1], np.uint8)
    at = begins[:-1].copy()
    if is_checked:
        at = _put(data, at, lengths.astype("<i4"), 4)
    at = _put(data, at, head, 4 * head.shape[1])
    for slot, (keys, count) in enumerate(columns):
        at = _put(data, at, np.ascontiguousarray(counts[:, slot]), 4)
        places = np.repeat(at, count) + key_type.itemsize * _within(count)
        _put(data, places, keys.astype(key_type), key_type.itemsize)
        at = at + count * key_type.itemsize
    if is_checked:
        sums = np.concatenate([[0], np.cumsum(data, dtype=np.int64)])
        prefix = np.cumsum([0, *lengths.astype("<i4").view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)])
        data[at] = ((np.diff(sums[begins]) - np.diff(prefix)) & 255).astype(np.uint8)
    path.write_bytes((_with_checksum(header.tobytes()) if is_checked else header.tobytes()) + data.tobytes())


def _with_checksum(data: bytes) -> bytes:
    """As HugeCTR's writer does it for the header too."""
    return len(data).to_bytes(4, "little") + data + bytes([sum(data) & 255])


def _as_bags(slot: NDArray[np.int64] | Bags) -> Bags:
    if isinstance(slot, Bags):
        return slot
    return Bags(slot.ravel(), np.arange(len(slot) + 1, dtype=np.int64) * slot.shape[1])


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, … within each list."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _put(data: NDArray[np.uint8], at: NDArray[np.int64], values: NDArray[np.generic], size: int) -> NDArray[np.int64]:
    """Write an element of `size` bytes at each place; returns the places after the elements."""
    if size and len(at):
        data[at[:, np.newaxis] + np.arange(size)] = values.view(np.uint8).reshape(len(at), size)
    return at + size


def write_raw(
    path: Path,
    labels: NDArray[np.float32],
    dense: NDArray[np.float32],
    slots: Sequence[NDArray[np.int64]],
    *,
    is_float: bool,
) -> None:
    """A file of the Raw format; labels and dense features as float32, or as int32.

    Args:
        slots: by slot, keys [samples, keys of each].
    """
    head = np.concatenate([labels, dense], axis=1)
    keys = np.concatenate([slot.reshape(len(labels), -1) for slot in slots], axis=1)
    numbers = head.astype("<f4").view("<i4") if is_float else head.astype("<i4")
    np.concatenate([numbers, keys.astype("<u4").view("<i4")], axis=1).tofile(path)


def write_parquet(
    path: Path,
    labels: NDArray[np.float32],
    dense: NDArray[np.float32],
    slots: Sequence[NDArray[np.int64] | Bags],
    *,
    rows_per_group: int | None = None,
) -> None:
    """Write a Parquet file with the columns label0…, I1…, C1…

    Args:
        path: the file.
        labels: [samples, labels].
        dense: [samples, dense features].
        slots: of each slot, the keys [samples, keys of each]; several keys become lists.
        rows_per_group: of the file; None: as many as PyArrow chooses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = column_names(labels.shape[1], dense.shape[1], len(slots))
    columns = [pa.array(column) for column in (*labels.T, *dense.T)]
    for slot in slots:
        if isinstance(slot, Bags) or slot.shape[1] != 1:
            bags = _as_bags(slot)
            columns.append(pa.ListArray.from_arrays(pa.array(bags.offsets.astype(np.int32)), pa.array(bags.keys)))
        else:
            columns.append(pa.array(slot[:, 0]))
    pq.write_table(pa.table(dict(zip(chain(*names), columns, strict=True))), path, row_group_size=rows_per_group)


def column_names(label_dim: int, dense_dim: int, num_slots: int) -> tuple[list[str], list[str], list[str]]:
    """The column names of labels, dense features and slots in `write_parquet`."""
    return (
        [f"label{i}" for i in range(label_dim)],
        [f"I{i + 1}" for i in range(dense_dim)],
        [f"C{i + 1}" for i in range(num_slots)],
    )


def write_metadata(folder: Path, num_rows: dict[Path, int], params: DataGeneratorParams) -> None:
    """`_metadata.json` of the files that `write_parquet` writes."""
    names = column_names(params.label_dim, params.dense_dim, params.num_slot)
    document: dict[str, object] = {
        "file_stats": [{"file_name": path.name, "num_rows": count} for path, count in num_rows.items()]
    }
    first = 0
    for section, columns in zip(("labels", "conts", "cats"), names, strict=True):
        document[section] = [{"col_name": name, "index": first + i} for i, name in enumerate(columns)]
        first += len(columns)
    (folder / "_metadata.json").write_text(json.dumps(document), encoding="utf-8")
