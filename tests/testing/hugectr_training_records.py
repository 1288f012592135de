"""Synthetic records, and a slow oracle that cuts batches from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.arguments import enums
from hotrow.training.hugectr.arguments.parameters import DataReaderParams
from hotrow.training.hugectr.arguments.tuning import AsyncParam
from hotrow.training.hugectr.readers.block import Bags, Block, RecordShape, SparseInput
from hotrow.training.hugectr.readers.sources import Source
from inference_session.hugectr import DataSourceParams


@dataclass(frozen=True)
class Records:
    """Some records, by slot."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    slots: list[Bags]

    def sample(self, number: int) -> tuple[list[float], list[float], list[list[int]]]:
        keys = [bags.keys[bags.offsets[number] : bags.offsets[number + 1]].tolist() for bags in self.slots]
        return self.labels[number].tolist(), self.dense[number].tolist(), keys


def make_records(
    random: np.random.Generator, num_samples: int, shape: RecordShape, *, limit: int, is_fixed: bool = False
) -> Records:
    slots = []
    for most in (count for item in shape.sparse for count in item.nnz_per_slot):
        counts = np.full(num_samples, most) if is_fixed else random.integers(0, most + 1, num_samples)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        slots.append(Bags(random.integers(0, limit, offsets[-1]), offsets))
    labels = random.integers(0, 2, (num_samples, shape.label_dim)).astype(np.float32)
    dense = random.integers(0, 100, (num_samples, shape.dense_dim)).astype(np.float32)
    return Records(labels, dense, slots)


def shape(label_dim: int = 1, dense_dim: int = 3, *slots: tuple[int, int], key_bytes: int = 8) -> RecordShape:
    """`slots`: per sparse input, its slots and the most keys in each."""
    inputs = tuple(SparseInput(f"keys{i}", num, (most,) * num, False) for i, (num, most) in enumerate(slots))
    return RecordShape(label_dim, dense_dim, inputs, key_bytes)


def source(
    place: Path,
    record_shape: RecordShape,
    format: enums.DataReaderType_t = enums.DataReaderType_t.Norm,  # noqa: A002
    *,
    check: enums.Check_t = enums.Check_t.Non,
    num_samples: int = 0,
    float_label_dense: bool = False,
    slot_size_array: tuple[int, ...] = (),
    async_param: AsyncParam | None = None,
) -> Source:
    params = DataReaderParams(
        format,
        str(place),
        eval_source=str(place),
        check_type=check,
        float_label_dense=float_label_dense,
        slot_size_array=slot_size_array,
        async_param=async_param,
    )
    return Source(str(place), params, record_shape, num_samples, DataSourceParams())


def samples_of(block: Block, record_shape: RecordShape) -> list[tuple[list[float], list[float], list[list[int]]]]:
    """The samples of a block, one by one."""
    found = []
    for number in range(len(block)):
        keys = []
        for bags, item in zip(block.bags, record_shape.sparse, strict=True):
            for slot in range(item.slot_num):
                at = number * item.slot_num + slot
                keys.append(bags.keys[bags.offsets[at] : bags.offsets[at + 1]].tolist())
        found.append((block.labels[number].tolist(), block.dense[number].tolist(), keys))
    return found
