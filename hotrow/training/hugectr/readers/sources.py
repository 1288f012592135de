"""Sources of training data: a file list or one file, local or on HDFS, read block by block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t
from hotrow.training.hugectr.arguments.parameters import DataReaderParams
from hotrow.training.hugectr.readers.block import Bags, Block, RecordShape, SparseInput
from hotrow.training.hugectr.readers.norm import read_norm
from hotrow.training.hugectr.readers.raw import read_raw
from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.importers.hugectr.data_source import DataSourceParams
from inference_session.model_source.fetch import fetch

_RECORDS_PER_BLOCK = 1 << 16


@dataclass(frozen=True)
class Source:
    """Records of one data set."""

    place: str
    """A file list, or the file itself of the Raw format; a path from the working directory, or a URL."""
    params: DataReaderParams
    shape: RecordShape
    num_samples: int
    """The samples to read of a Raw file; 0: all."""
    data_source: DataSourceParams

    def blocks(self, num_wanted: Callable[[], int] = lambda: _RECORDS_PER_BLOCK) -> Iterator[Block]:
        """All records once, as the model reads them.

        A block of Norm or Raw has as many as `num_wanted` says; of Parquet it is a row group.

        Raises:
            ModelFormatError: a file is not what its format promises; names file and record or row group.
            OSError: a file cannot be read.
        """
        num_before = 0
        for block in self._read(num_wanted):
            pairs = zip(self.shape.sparse, block.bags, strict=True)
            bags = tuple(self._slots(item, each, num_before) if item.keys_are_slots else each for item, each in pairs)
            self._check_classes(block.labels, num_before)
            num_before += len(block)
            yield replace(block, bags=bags)

    def _slots(self, item: SparseInput, bags: Bags, num_before: int) -> Bags:
        """A list for each key."""
        (wanted,) = item.nnz_per_slot
        if bags.width != wanted:
            uneven = np.flatnonzero(np.diff(bags.offsets) != wanted)
            if len(uneven):
                sample = int(uneven[0])
                raise ModelFormatError(
                    f"{self.place}: sample {num_before + sample} has {np.diff(bags.offsets)[sample]} keys of "
                    f"{item.name!r}; {wanted} are expected, whose vectors are put side by side"
                )
        return Bags(bags.keys, width=1)

    def _check_classes(self, labels: NDArray[np.float32], num_before: int) -> None:
        for column, num_classes in self.shape.num_classes:
            classes = np.rint(labels[:, column])
            wrong = np.flatnonzero(~((classes >= 0) & (classes < num_classes)))
            if len(wrong):
                raise ModelFormatError(
                    f"{self.place}: sample {num_before + wrong[0]} has the label {labels[wrong[0], column]:g}; "
                    f"CrossEntropyLoss expects the number of a class, 0 to {num_classes - 1}: its bottom has "
                    f"{num_classes} columns"
                )

    def _read(self, num_wanted: Callable[[], int]) -> Iterator[Block]:
        """As they are in the files."""
        if self.params.data_reader_type in (DataReaderType_t.Raw, DataReaderType_t.RawAsync):
            path = self._local(self.place)
            yield from read_raw(path, self.shape, self.params.raw_format, self.num_samples, num_wanted=num_wanted)
            return
        for name in self._files():
            if self.params.data_reader_type is DataReaderType_t.Norm:
                is_checked = self.params.check_type is Check_t.Sum
                path = self._local(name, self.place)
                yield from read_norm(path, self.shape, is_checked=is_checked, num_wanted=num_wanted)
            else:
                yield from self._parquet(name)

    def elsewhere(self, place: str) -> Source:
        """Records of the same shape from another place."""
        return replace(self, place=place)

    def _parquet(self, name: str) -> Iterator[Block]:
        from hotrow.training.hugectr.readers.parquet import METADATA_FILE, SlotOffsets, read_metadata, read_parquet

        folder = name.rpartition("/")[0] or "."
        offsets = SlotOffsets(self.params.slot_size_array, self.shape.slot_num)
        metadata = read_metadata(self._local(f"{folder}/{METADATA_FILE}", self.place).parent, self.shape)
        yield from read_parquet(self._local(name, self.place), self.shape, metadata, offsets)

    def _files(self) -> list[str]:
        """What the file list names."""
        path = self._local(self.place)
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{path}: a file list is text: the number of files, then a file a line") from error
        if not lines or re.fullmatch("[0-9]{1,18}", lines[0]) is None:
            found = repr(lines[0][:40]) if lines else "nothing"
            raise ModelFormatError(f"{path}: a file list begins with the number of files, found {found}")
        if int(lines[0]) != len(lines) - 1 or len(lines) == 1:
            raise ModelFormatError(f"{path}: says {lines[0]} files, but names {len(lines) - 1}")
        return lines[1:]

    def _local(self, place: str, file_list: str = "") -> Path:
        """The file on this machine; what is on HDFS is copied first. `file_list` names it, if any does."""
        path = fetch(self.data_source.place_of(place))
        named = f" ({file_list} names it)" if file_list else ""
        if not path.exists():
            raise ConfigurationError(
                f"{path}: no such file{named}; paths of training data count from the working directory, {Path.cwd()}"
            )
        if path.is_dir():
            raise ConfigurationError(f"{path}: a folder{named}, where a file of training data was expected")
        return path
