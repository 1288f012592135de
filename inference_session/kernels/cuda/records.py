"""What the CUDA kernels read besides SEGMENT records, field by field as in cuda/layout.cuh; how a request is cut up.

Nothing here needs a GPU: tests/testing/cuda_model.py computes what the kernels do from the same records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import InvalidRequestError
from inference_session.kernels.records import SEGMENT, PoolingCode, VectorCode

SLOTS = 62
BUCKET_BYTES = 64
MOST_BUCKETS = (2**32 - 2) // SLOTS
"""Slots are numbered by 32 bits, and one number says that there is none."""
_FULLEST = 0.55
"""Of the slots of an index over all keys, those in use at most."""
MAX_INLINE_SEGMENTS = 32
"""Segments that travel as a kernel's parameter; more are copied to the device first."""
COUNT_STRIDE = 16
"""From one count in host memory to the next, in elements: atomic operations in one line wait for each other."""
MAX_SHARDS = 8
"""GPUs that the rows of one table may be divided among."""
MAX_TARGETS = 32
"""Indexes that are written to at once: they travel as a kernel's parameter."""
WARP = 32
_ALIGNMENT, _LINE_BYTES = 256, 64
EVENTS = ("inserts", "updates", "evictions", "erases", "misses", "unknown", "refused")

INDEX = np.dtype(
    [(name, np.int64) for name in ("tags_address", "keys_address", "marks_address")]
    + [(name, np.int64) for name in ("others_address", "num_buckets", "first_key")]
)
ROWS = np.dtype([(name, np.int64) for name in ("vectors_address", "row_bytes", "vector_code", "wide")])
GPU_TABLE = np.dtype(
    [
        ("cached", INDEX),
        ("cached_rows", ROWS),
        ("base", INDEX),
        ("base_rows", ROWS),
        ("base_numbers_address", np.int64),
        ("num_base_rows", np.int64),
        ("num_row_numbers", np.int64),
        ("embedding_dim", np.int64),
        ("default_address", np.int64),
        ("events_address", np.int64),
        ("shard_addresses", np.int64, (MAX_SHARDS,)),
        ("samples_address", np.int64),
        ("max_sampled", np.int64),
    ]
)
SAMPLES = np.dtype([(name, np.int64) for name in ("num_keys", "copies_read", "keys_address")])
REQUEST = np.dtype(
    [
        ("tables_address", np.int64),
        ("segments_address", np.int64),
        ("first_tiles_address", np.int64),
        ("missing_bits_address", np.int64),
        ("num_unknown_address", np.int64),
        ("unknown_sums_address", np.int64),
        ("order_address", np.int64),
        ("num_segments", np.uint32),
        ("num_tiles", np.uint32),
        ("keys_per_tile", np.uint32),
        ("seed", np.uint32),
        ("num_ordered_blocks", np.uint32),
        ("few_tiles", np.uint32, (MAX_INLINE_SEGMENTS + 1,)),
        ("few_begins", np.uint32, (MAX_INLINE_SEGMENTS,)),
        ("few_segments", SEGMENT, (MAX_INLINE_SEGMENTS,)),
    ],
    align=True,
)

TARGET = np.dtype(
    [
        ("index", INDEX),
        ("rows", ROWS),
        ("events_address", np.int64),
        ("keys_address", np.int64),
        ("vectors_address", np.int64),
        ("num_keys", np.uint32),
        ("first", np.uint32),
    ],
    align=True,
)
BATCH = np.dtype(
    [
        ("seen_address", np.int64),
        ("claims_address", np.int64),
        ("places_address", np.int64),
        ("seen_mask", np.uint32),
        ("num_targets", np.uint32),
        ("num_positions", np.uint32),
        ("may_insert", np.uint32),
        ("may_evict", np.uint32),
        ("targets", TARGET, (MAX_TARGETS,)),
    ],
    align=True,
)

MAX_KEYS_PER_TILE = 32
_MANY_KEYS, _FEW_KEYS_PER_TILE = 1 << 17, 8
_VERY_FEW_KEYS, _LEAST_KEYS_PER_TILE = 1 << 12, 4
MAX_BAGS_PER_TILE = 8
_SHORT_BAG = 16
"""Keys of a bag of which a tile takes as many as it can."""
_LEAST_POOLED_TILES = 1 << 12
_MOST_TILES = 2**31 - 1
NOT_ORDERED = 2**32 - 1
"""In place of where a segment's keys begin in an order: they are taken as they come."""
_LEAST_REGION_BYTES, _MOST_REGIONS = 2 << 20, 4096
_LEAST_ORDERED_KEYS, _LEAST_ORDERED_BYTES = 1 << 13, 1 << 30
"""Fewer keys, or keys of less host memory, are found sooner as they come."""
_ELEMENT_BYTES = {VectorCode.FLOAT32: 4, VectorCode.FLOAT16: 2, VectorCode.INT8: 1}


class Tiles(NamedTuple):
    """How the segments of a request are divided among warps."""

    first: NDArray[np.uint32]
    """[segments + 1], the tile that each segment begins with; the last one is the number of tiles."""
    keys_per_tile: int
    """Of segments without pooling."""
    bags_per_tile: NDArray[np.int64]
    """[segments], of each that is pooled, at most; its tiles take about equally many."""
    pooled: bool
    """Whether any segment is."""


def divide(segments: NDArray[np.void]) -> Tiles:
    """Tiles for these SEGMENT records. Small requests get small tiles, so that more warps work on them."""
    num_keys = segments["num_rows"] * segments["keys_per_row"]
    pooled = segments["pooling"] != PoolingCode.NONE
    total = num_keys.sum()
    keys_per_tile = MAX_KEYS_PER_TILE if total >= _MANY_KEYS else _FEW_KEYS_PER_TILE
    if total < _VERY_FEW_KEYS:
        keys_per_tile = _LEAST_KEYS_PER_TILE
    bags_per_tile = _bags_per_tile(segments, int(segments["num_rows"][pooled].sum()))
    num_tiles = np.where(pooled, -(-segments["num_rows"] // bags_per_tile), -(-num_keys // keys_per_tile))
    ends = np.cumsum(num_tiles)
    if len(ends) and max(ends[-1], num_keys.max()) > _MOST_TILES:
        raise InvalidRequestError(
            f"{num_keys.sum()} keys at once are more than a GPU looks up in one launch; send fewer samples at once"
        )
    return Tiles(np.concatenate([[0], ends]).astype(np.uint32), keys_per_tile, bags_per_tile, bool(pooled.any()))


def _bags_per_tile(segments: NDArray[np.void], num_bags: int) -> NDArray[np.int64]:
    """Several bags where they are short, so that every lane of a warp has a key to find; fewer in small requests.

    `num_bags`: of all segments.
    """
    wanted = _SHORT_BAG * MAX_BAGS_PER_TILE // np.maximum(segments["keys_per_row"], 1)
    wanted = np.where(segments["begins_address"] != 0, 4, wanted)
    return wanted.clip(1, max(1, min(num_bags // _LEAST_POOLED_TILES, MAX_BAGS_PER_TILE)))


class Regions(NamedTuple):
    """How the rows of segments are divided, by which their keys are put in order (order.cu)."""

    begins: NDArray[np.uint32]
    """[segments], where the keys of each begin in the order; or NOT_ORDERED."""
    of_segments: NDArray[np.uint32]
    """[segments, 2], the first region of each, and the rows of a region."""
    num_keys: int
    """Of all segments that are ordered."""
    num_regions: int


def regions_of(segments: NDArray[np.void], num_rows: NDArray[np.int64], row_bytes: NDArray[np.int64]) -> Regions | None:
    """The regions of the segments whose rows lie in host memory; None where an order of their keys gains nothing.

    `num_rows`: of each table, those in host memory; `row_bytes`: of each table, the size of a row.
    """
    num_keys = segments["num_rows"] * segments["keys_per_row"]
    rows, widths = num_rows[segments["table"]], row_bytes[segments["table"]]
    num_keys[(segments["pooling"] != PoolingCode.NONE) | (rows == 0)] = 0
    used = np.unique(segments["table"][num_keys > 0])
    num_bytes = int((num_rows * row_bytes)[used].sum())
    if num_keys.sum() < _LEAST_ORDERED_KEYS or num_bytes < _LEAST_ORDERED_BYTES or len(segments) > MAX_INLINE_SEGMENTS:
        return None
    region_bytes = max(_LEAST_REGION_BYTES, num_bytes // _MOST_REGIONS)
    rows_per_region = np.maximum(region_bytes // widths, 1)
    num_regions = np.where(num_keys > 0, -(-rows // rows_per_region), 0)
    begins = np.where(num_keys > 0, np.cumsum(num_keys) - num_keys, NOT_ORDERED).astype(np.uint32)
    of_segments = np.stack([np.cumsum(num_regions) - num_regions, rows_per_region], axis=1).astype(np.uint32)
    return Regions(begins, of_segments, int(num_keys.sum()), int(num_regions.sum()))


def request_of(segments: NDArray[np.void], tiles: Tiles) -> NDArray[np.void]:
    """A REQUEST record for these segments, complete but for addresses; they are in it if they are few enough."""
    request = np.zeros((), REQUEST)
    request["num_segments"], request["num_tiles"] = len(segments), tiles.first[-1]
    request["keys_per_tile"], request["few_begins"] = tiles.keys_per_tile, NOT_ORDERED
    if len(segments) <= MAX_INLINE_SEGMENTS:
        request["few_tiles"][: len(tiles.first)] = tiles.first
        request["few_segments"][: len(segments)] = segments
    return request


def batch_of(targets: NDArray[np.void], *, may_insert: bool, may_evict: bool) -> NDArray[np.void]:
    """A BATCH record for these TARGET records, one to MAX_TARGETS, complete but for addresses."""
    batch = np.zeros((), BATCH)
    positions = (targets["num_keys"] + (WARP - 1)) // WARP * WARP
    ends = np.cumsum(positions)
    num_positions = int(ends[-1])
    batch["seen_mask"] = (1 << (2 * num_positions - 1).bit_length()) - 1
    batch["num_targets"], batch["num_positions"] = len(targets), num_positions
    batch["may_insert"], batch["may_evict"] = may_insert, may_evict
    few = batch["targets"][: len(targets)]
    few[:], few["first"] = targets, ends - positions
    return batch


def target_record(
    index: NDArray[np.void], events_address: int, keys: Any, rows: NDArray[np.void] | None = None, vectors: Any = None
) -> NDArray[np.void]:
    """A TARGET record, as an array of one: keys int64 [n] and, for `rows`, vectors float32 [n, dim], on the device."""
    target = np.zeros(1, TARGET)
    target["index"], target["events_address"] = index, events_address
    target["keys_address"], target["num_keys"] = keys.data.ptr, len(keys)
    if rows is not None:
        target["rows"], target["vectors_address"] = rows, vectors.data.ptr
    return target


def index_bytes(num_buckets: int, *, marks: bool, numbers: bool) -> int:
    """Memory of an index: see `index_record`; numbers, uint32 of each slot, stand behind it."""
    return zero_bytes(num_buckets, marks=marks) + num_buckets * SLOTS * (8 + (4 if numbers else 0))


def zero_bytes(num_buckets: int, *, marks: bool) -> int:
    """Of an index, how many bytes must be zeros at first: those before the keys."""
    return _LINE_BYTES + num_buckets * BUCKET_BYTES * (2 if marks else 1)


def index_record(address: int, num_buckets: int, *, marks: bool, first_key: int = 0) -> NDArray[np.void]:
    """An INDEX record: tags, marks if there are any, a line for `others`, keys."""
    marks_address = address + num_buckets * BUCKET_BYTES
    keys_address = address + zero_bytes(num_buckets, marks=marks)
    others_address = keys_address - _LINE_BYTES
    given = marks_address if marks else 0
    return np.array((address, keys_address, given, others_address, num_buckets, first_key), INDEX)


def aligned(num_bytes: int) -> int:
    """The next offset at or after this many bytes at which a part of a piece of memory may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def table_bytes(num_buckets: int, row_bytes: int) -> int:
    """Memory of a table of this many buckets whose slots have a row each: see `rows_by_slot`."""
    index = aligned(index_bytes(num_buckets, marks=True, numbers=False))
    return index + aligned(SLOTS * num_buckets * row_bytes)


def rows_by_slot(address: int, num_buckets: int, dim: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """INDEX and ROWS records of such a table of float32 rows at this address."""
    vectors = address + aligned(index_bytes(num_buckets, marks=True, numbers=False))
    return index_record(address, num_buckets, marks=True), rows_record(vectors, 4 * dim, VectorCode.FLOAT32, dim)


def buckets_for_all(num_rows: int) -> int:
    """Buckets such that this many keys all find room, but for one table in twenty; keys share buckets at random."""
    num_buckets = int(num_rows / (SLOTS * _FULLEST)) + 1
    while num_buckets * _share_overfull(num_rows / num_buckets) > 0.05:
        num_buckets += num_buckets // 32 + 1
    return num_buckets


def _share_overfull(mean: float) -> float:
    """Of buckets with this many keys on average, those with more than their slots but one, which inserts leave free."""
    if mean == 0:
        return 0.0
    return math.fsum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(SLOTS, 2 * SLOTS))


def rows_record(address: int, row_bytes: int, code: VectorCode, dim: int) -> NDArray[np.void]:
    """A ROWS record. Four elements of a row are loaded at once where they are aligned and leave no rest."""
    unit = 4 * _ELEMENT_BYTES[code]
    wide = dim % 4 == 0 and address % unit == 0 and row_bytes % unit == 0
    return np.array((address, row_bytes, int(code), int(wide)), ROWS)


def table_record(
    dim: int,
    *,
    cached: NDArray[np.void] | None = None,
    cached_rows: NDArray[np.void] | None = None,
    base: NDArray[np.void] | None = None,
    base_rows: NDArray[np.void] | None = None,
    base_numbers_address: int = 0,
    num_base_rows: int = 0,
    num_row_numbers: int = 0,
    default_address: int = 0,
    events_address: int = 0,
    shard_addresses: Sequence[int] = (),
) -> np.void:
    """A GPU_TABLE record: rows in a cache (`cached`), and behind them rows that are all there (`base`), or either.

    `num_row_numbers`: keys are the numbers of this many rows, negative ones from the end; 0: keys are stored.
    `shard_addresses`: where base rows begin on each GPU, if each has a part of them; row r is on GPU r % their number.
    """
    record: np.void = np.zeros(1, GPU_TABLE)[0]
    record["cached_rows"]["wide"] = record["base_rows"]["wide"] = 1  # of none: all that there are
    for field, value in (("cached", cached), ("cached_rows", cached_rows), ("base", base), ("base_rows", base_rows)):
        if value is not None:
            record[field] = value
    if cached_rows is None:  # pooled look-ups expect rows of the type that cached ones have
        record["cached_rows"]["vector_code"] = record["base_rows"]["vector_code"]
    record["base_numbers_address"], record["num_base_rows"] = base_numbers_address, num_base_rows
    record["num_row_numbers"], record["embedding_dim"] = num_row_numbers, dim
    record["default_address"], record["events_address"] = default_address, events_address
    record["shard_addresses"][: len(shard_addresses)] = shard_addresses
    return record


def numbered_tables(
    dims: NDArray[np.int64], addresses: NDArray[np.int64], num_rows: NDArray[np.int64]
) -> NDArray[np.void]:
    """GPU_TABLE records of float32 rows at these addresses, whose keys are their numbers; other keys leave no trace."""
    records = np.zeros(len(dims), GPU_TABLE)
    records["num_base_rows"], records["embedding_dim"], records["num_row_numbers"] = num_rows, dims, num_rows
    records["cached_rows"]["wide"] = 1
    rows = records["base_rows"]
    rows["vectors_address"], rows["row_bytes"], rows["vector_code"] = addresses, 4 * dims, VectorCode.FLOAT32
    rows["wide"] = (dims % 4 == 0) & (addresses % 16 == 0)
    return records


def offset_of(dtype: np.dtype[Any], field: str) -> int:
    """Bytes from the beginning of a record to one of its fields."""
    assert dtype.fields is not None  # noqa: S101  it is a record's
    return int(dtype.fields[field][1])
