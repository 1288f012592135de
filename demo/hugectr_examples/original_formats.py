"""Readers of public data sets in the formats in which they are published, into columns that `write_parquet` takes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from hotrow.training.hugectr.readers.block import Bags
from inference_session.errors import ModelFormatError

CRITEO_SLOT_SIZE = 100_000
"""Values of a Criteo column are hashed to this many keys."""
REES46_SLOT_SIZES = (100_000, 100_000, 5_000, 10_000, 10)
"""Users, products, categories, brands, weekdays."""
MAX_CLICKS = 30
"""Number of a reader's last clicks that the news recommender gets."""
NUM_NEWS, NUM_CATEGORIES, NUM_READERS = 100_000, 1_000, 100_000

Keys = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Samples, in order of time if the format contains it."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    slots: Sequence[Bags]
    slot_sizes: Sequence[int]

    def split(self, fraction: float = 0.8) -> tuple[Rows, Rows]:
        """The first samples, and the rest."""
        cut = int(len(self.labels) * fraction)
        return self._part(0, cut), self._part(cut, len(self.labels))

    def _part(self, begin: int, end: int) -> Rows:
        slots = [bags.part(begin, end) for bags in self.slots]
        return Rows(self.labels[begin:end], self.dense[begin:end], slots, self.slot_sizes)


def read_criteo(folder: Path, max_rows: int) -> Rows:
    """Criteo's display advertising data: `train.txt`, or `day_*`; tabs between a label, 13 counts and 26 hashes."""
    days = [(int(day[1]), path) for path in folder.iterdir() if (day := re.match(r"day_(\d{1,9})", path.name))]
    files = [path for path in (folder / "train.txt",) if path.exists()] or [path for _, path in sorted(days)]
    if not files:
        raise ModelFormatError(f"{folder}: holds neither train.txt nor day_0, day_1 … of Criteo")
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    types = {name: pa.int64() if name[0] in "lI" else pa.string() for name in names}
    table = _read_csv(files, names, types, "\t", max_rows)
    counts = np.stack([table[name].fill_null(0).to_numpy() for name in names[1:14]], axis=1)
    slots = [_one_key(_hashed(table[name], CRITEO_SLOT_SIZE)) for name in names[14:]]
    dense = np.log1p(np.maximum(counts, 0)).astype(np.float32)
    labels = table["label"].to_pylist()
    for number, label in enumerate(labels, 1):
        if label not in (0, 1):
            found = "missing" if label is None else label
            place = files[0] if len(files) == 1 else folder
            raise ModelFormatError(f"{place}: row {number}: the label is {found}; expected 0 or 1")
    return Rows(_labels(np.array(labels)), dense, slots, (CRITEO_SLOT_SIZE,) * 26)


def read_rees46(path: Path, max_rows: int) -> Rows:
    """REES46's events of a shop, `2019-Oct.csv`: the label is whether a product was put into a cart or bought."""
    columns = ["event_time", "event_type", "product_id", "category_id", "brand", "price", "user_id"]
    types = {name: pa.float64() if name == "price" else pa.string() for name in columns}
    table = _read_csv([path], None, types, ",", max_rows)
    times = np.array([_time(path, i, text) for i, text in enumerate(table["event_time"].to_pylist(), 1)])
    hours = times.astype("datetime64[h]").astype(np.int64) % 24
    weekdays = times.astype("datetime64[D]").astype(np.int64) % 7
    prices = np.log1p(np.maximum(table["price"].fill_null(0.0).to_numpy(), 0.0))
    angles = hours * (2 * np.pi / 24)
    dense = np.stack([prices, np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    names = ("user_id", "product_id", "category_id", "brand")
    keys = [_hashed(table[name], size) for name, size in zip(names, REES46_SLOT_SIZES, strict=False)]
    is_wanted = np.isin(np.array(table["event_type"].to_pylist()), ["cart", "purchase"])
    return Rows(_labels(is_wanted), dense, [_one_key(column) for column in (*keys, weekdays)], REES46_SLOT_SIZES)


def _time(path: Path, row: int, text: str | None) -> np.datetime64:
    if text:
        with suppress(ValueError):
            return np.datetime64(text.removesuffix(" UTC"), "s")
    found = repr(text) if text else "missing"
    raise ModelFormatError(f"{path}: row {row}: event_time is {found}; expected one like '2019-10-01 00:00:00 UTC'")


def read_mind(folder: Path, max_rows: int) -> Rows:
    """Microsoft's news data: `behaviors.tsv` and `news.tsv`; a sample per news item that was shown.

    Slots: news clicked before, the item; their categories, the item's; the reader. The first two pairs share tables.
    """
    categories = {item: category for _, (item, category) in _lines(folder / "news.tsv", 2)}
    path = folder / "behaviors.tsv"
    samples = list(islice(_impressions(path), max_rows))
    if not samples:
        raise ModelFormatError(f"{path}: no rows")
    clicks, shown, readers, labels = zip(*samples, strict=True)
    flat = [item for before in clicks for item in before]
    offsets = np.cumsum([0, *map(len, clicks)])
    slots = [
        Bags(_hashed(pa.array(flat, pa.string()), NUM_NEWS), offsets),
        _one_key(_hashed(pa.array(shown, pa.string()), NUM_NEWS)),
        Bags(_hashed(_of(flat, categories), NUM_CATEGORIES), offsets),
        _one_key(_hashed(_of(shown, categories), NUM_CATEGORIES)),
        _one_key(_hashed(pa.array(readers, pa.string()), NUM_READERS)),
    ]
    dense = np.log1p(np.array([[len(before)] for before in clicks], np.float32)).reshape(-1, 1)
    return Rows(_labels(np.array(labels)), dense, slots, (0, NUM_NEWS, 0, NUM_CATEGORIES, NUM_READERS))


def _impressions(path: Path) -> Iterator[tuple[list[str], str, str, bool]]:
    """News clicked before, a news item that was shown, its reader, and whether it was clicked."""
    for number, (_, reader, _, history, impressions) in _lines(path, 5):
        before = history.split()[-MAX_CLICKS:]
        for text in impressions.split():
            item, _, clicked = text.rpartition("-")
            if clicked not in ("0", "1"):
                raise ModelFormatError(
                    f"{path}:{number}: {text!r}; expected a news item and -0 or -1, whether it was clicked"
                )
            yield before, item, reader, clicked == "1"


def _of(items: Sequence[str], categories: dict[str, str]) -> pa.Array:
    return pa.array([categories.get(item, "") for item in items], pa.string())


def _lines(path: Path, num_fields: int) -> Iterator[tuple[int, list[str]]]:
    """The number of each line, and its first fields."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip("\n").split("\t")[:num_fields]
                if line.strip() and len(fields) < num_fields:
                    raise ModelFormatError(
                        f"{path}:{number}: {len(fields)} fields between tabs; MIND has {num_fields} or more"
                    )
                if line.strip():
                    yield number, fields
    except FileNotFoundError as error:
        raise ModelFormatError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: no text in UTF-8: {error}") from error


def _read_csv(
    files: Sequence[Path], names: list[str] | None, types: dict[str, pa.DataType], delimiter: str, max_rows: int
) -> pa.Table:
    tables, num_rows = [], 0
    for path in files:
        reading = csv.ReadOptions(column_names=names)
        parsing = csv.ParseOptions(delimiter=delimiter, quote_char=False if delimiter == "\t" else '"')
        converting = csv.ConvertOptions(column_types=types, include_columns=list(types), strings_can_be_null=True)
        try:
            with csv.open_csv(path, reading, parsing, converting) as reader:
                for batch in reader:
                    tables.append(pa.Table.from_batches([batch]))
                    num_rows += len(batch)
                    if num_rows >= max_rows:
                        return pa.concat_tables(tables).slice(0, max_rows).combine_chunks()
        except pa.ArrowKeyError as error:
            raise ModelFormatError(f"{path}: begins with no header of the columns {', '.join(types)}") from error
        except pa.ArrowInvalid as error:
            raise ModelFormatError(f"{path}: {error}") from error
    if not num_rows:
        raise ModelFormatError(f"{files[0]}: no rows")
    return pa.concat_tables(tables).combine_chunks()


def _hashed(values: pa.Array | pa.ChunkedArray, size: int) -> Keys:
    """Keys from 0 to size - 1; what is missing is 0."""
    whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    encoded = (pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole).dictionary_encode()
    of_value = [
        0 if not text else 1 + zlib.crc32(text.encode()) % (size - 1) for text in encoded.dictionary.to_pylist()
    ]
    keys = np.array([*of_value, 0], np.int64)
    places: Keys = encoded.indices.fill_null(len(of_value)).to_numpy(zero_copy_only=False).astype(np.int64)
    return keys[places]


def _one_key(keys: Keys) -> Bags:
    return Bags(keys, np.arange(len(keys) + 1, dtype=np.int64))


def _labels(values: NDArray[np.generic]) -> NDArray[np.float32]:
    return values.astype(np.float32).reshape(-1, 1)
