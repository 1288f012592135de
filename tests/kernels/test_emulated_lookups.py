"""The kernels' look-ups, on a processor (tests/testing/emulated_gpu.py): the answers that plain Python computes."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.kernels.cuda import records
from inference_session.kernels.cuda.records import (
    GPU_TABLE,
    TARGET,
    rows_by_slot,
    rows_record,
    table_bytes,
    table_record,
)
from inference_session.kernels.records import SEGMENT, PoolingCode, VectorCode, address_of
from inference_session.tables.quantized_rows import dequantize_rows, quantize_rows
from tests.testing.emulated_gpu import COMPILER, EmulatedGpu, aligned

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C++ compiler")
DIMS = (1, 2, 3, 4, 16, 32, 64, 68, 96, 128, 132, 256, 1024)
NUM_ROWS = 150
UNKNOWN = (2**63 - 1, -(2**63), 10**9)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """For rows in float32."""
    return EmulatedGpu(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """For rows and outputs of all types, and tables that are divided among two GPUs."""
    return EmulatedGpu(tmp_path_factory.mktemp("narrow"), NARROW_ROWS=1, NARROW_OUTPUTS=1, NUM_SHARDS=2)


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """For rows that change."""
    return EmulatedGpu(tmp_path_factory.mktemp("changing"), ROWS_CHANGE=1)


@pytest.fixture(scope="module")
def ordering(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """For keys that are taken in an order of their own."""
    return EmulatedGpu(tmp_path_factory.mktemp("ordering"), IN_ORDER=1)


@dataclass
class LookedUp:
    """A table, and what its keys should give."""

    record: NDArray[np.void]
    rows: dict[int, NDArray[np.float32]]
    default: NDArray[np.float32] | None
    held: list[Any]
    """Kept alive for the record."""


def numbered(rng: np.random.Generator, dim: int, dtype: str, default: NDArray[np.float32] | None) -> LookedUp:
    """A table whose keys are row numbers, negative ones from the end."""
    vectors = rng.standard_normal((NUM_ROWS, dim), np.float32)
    if dtype == "float32":
        vectors[:3, dim // 2] = np.nan, np.inf, -np.inf
    stored = vectors if dtype == "float32" else quantize_rows(vectors, dtype)
    memory = aligned(stored.nbytes)
    memory[:] = stored.reshape(-1).view(np.uint8)
    rows = rows_record(address_of(memory), stored.nbytes // NUM_ROWS, VectorCode[dtype.upper()], dim)
    record = table_record(
        dim,
        base_rows=rows,
        num_base_rows=NUM_ROWS,
        num_row_numbers=NUM_ROWS,
        default_address=0 if default is None else address_of(default),
    )
    exact = vectors if dtype == "float32" else dequantize_rows(stored, dtype)
    by_key = {i: exact[i] for i in range(-NUM_ROWS, NUM_ROWS)}
    return LookedUp(np.array(record), by_key, default, [memory, default])


def give_keys(gpu: EmulatedGpu, table: LookedUp, keys: NDArray[np.int64]) -> None:
    """Keys of their own instead of numbers, one for each row, in an index below the cache."""
    num_buckets, exact = records.buckets_for_all(NUM_ROWS), table.rows
    memory, events = aligned(records.index_bytes(num_buckets, marks=False, numbers=False)), np.zeros(8, np.uint64)
    numbers = np.zeros(num_buckets * records.SLOTS, np.uint32)
    target = np.zeros(1, TARGET)
    target["index"] = records.index_record(address_of(memory), num_buckets, marks=False)
    target["keys_address"], target["num_keys"], target["events_address"] = (
        address_of(keys),
        len(keys),
        address_of(events),
    )
    gpu.write_numbers(target, numbers)
    assert events[0] == NUM_ROWS
    table.record["base"], table.record["base_numbers_address"] = target["index"][0], address_of(numbers)
    table.record["num_row_numbers"] = table.record["num_base_rows"] = 0
    table.rows = {key: exact[i] for i, key in enumerate(keys.tolist())}
    table.held += [memory, numbers]


def put_in_front(
    gpu: EmulatedGpu, rng: np.random.Generator, table: LookedUp, keys: NDArray[np.int64], dim: int
) -> None:
    """A cache of four buckets, which hold what fits of these keys, with rows of their own."""
    memory = aligned(table_bytes(4, 4 * dim))
    index, rows = rows_by_slot(address_of(memory), 4, dim)
    vectors, events = rng.standard_normal((len(keys), dim), np.float32), np.zeros(8, np.uint64)
    target = np.zeros(1, TARGET)
    target["index"], target["rows"], target["events_address"] = index, rows, address_of(events)
    target["keys_address"], target["vectors_address"], target["num_keys"] = (
        address_of(keys),
        address_of(vectors),
        len(keys),
    )
    gpu.write_rows(target)
    inserts, updates, evictions = events[:3].astype(np.int64).tolist()
    held = held_keys(index)
    assert len(held) == inserts - evictions, (inserts, updates, evictions)
    last = {int(key): vectors[i] for i, key in enumerate(keys.tolist())}
    table.rows.update({key: last[key] for key in held})
    if table.record["num_row_numbers"]:
        table.rows.update({key - NUM_ROWS: last[key] for key in held})
    table.record["cached"], table.record["cached_rows"] = index, rows
    table.held += [memory, events]


def held_keys(index: NDArray[np.void]) -> set[int]:
    """The keys of four buckets."""
    tags = np.ctypeslib.as_array((ctypes.c_uint8 * 256).from_address(int(index["tags_address"])))
    keys = np.ctypeslib.as_array((ctypes.c_int64 * (4 * records.SLOTS)).from_address(int(index["keys_address"])))
    return set(keys[tags.reshape(4, 64)[:, : records.SLOTS].reshape(-1) > 0].tolist())


class Asked:
    """A segment with random keys, and what it should write."""

    def __init__(
        self,
        rng: np.random.Generator,
        tables: list[LookedUp],
        number: int,
        pooling: PoolingCode,
        dtype: type[np.floating[Any]],
    ) -> None:
        self.table, self.pooling = tables[number], pooling
        self.dim = int(self.table.record["embedding_dim"])
        self.ragged = pooling != PoolingCode.NONE and rng.random() < 0.5
        num_rows = int(rng.choice([1, 5, 40]))
        length = int(rng.choice([1, 2, 8, 40])) if pooling != PoolingCode.NONE else int(rng.choice([1, 3]))
        lengths = rng.choice([0, 1, 2, 7, 8, 9, 33, 70], num_rows) if self.ragged else np.full(num_rows, length)
        gap = int(rng.choice([0, 3]))
        self.ends = np.cumsum(lengths + gap)
        self.begins = self.ends - lengths
        some = np.array([*self.table.rows, *(UNKNOWN * 20 if rng.random() < 0.5 else ())], np.int64)
        self.keys = rng.choice(some, (int(self.ends[-1]) + 1, int(rng.choice([1, 2]))))
        narrow_keys = bool(rng.random() < 0.3)
        if narrow_keys:
            self.keys = rng.integers(-NUM_ROWS, NUM_ROWS, self.keys.shape).astype(np.int32)
        weighted = pooling != PoolingCode.NONE and rng.random() < 0.3
        self.weights = rng.standard_normal(len(self.keys)).astype(np.float32) if weighted else None
        self.first_weights = self.begins if self.ragged else np.arange(num_rows) * length
        width = self.dim * (length if pooling == PoolingCode.NONE else 1)
        extra = int(rng.choice([0, 4, 1]))
        element_bytes = np.dtype(dtype).itemsize
        self.memory = aligned(element_bytes * num_rows * (width + extra)).view(dtype).reshape(num_rows, -1)
        self.memory[:] = np.nan
        self.out = self.memory[:, extra:]
        self.segment = np.zeros(1, SEGMENT)
        fields = {
            "table": number,
            "keys_address": address_of(self.keys) + (0 if self.ragged else gap * self.keys.strides[0]),
            "key_bytes": self.keys.itemsize,
            "row_stride": (length + gap) * self.keys.strides[0],
            "key_stride": self.keys.strides[0],
            "num_rows": num_rows,
            "keys_per_row": length,
            "weights_address": 0 if self.weights is None else address_of(self.weights),
            "pooling": pooling,
            "output_address": address_of(self.memory) + element_bytes * extra,
            "output_stride": self.memory.strides[0],
            "output_code": VectorCode[np.dtype(dtype).name.upper()],
        }
        if self.ragged:
            fields |= {"begins_address": address_of(self.begins), "ends_address": address_of(self.ends)}
        for name, value in fields.items():
            self.segment[name] = value

    def check(self) -> list[int]:
        """Compare the outputs; returns the places of keys that have no row."""
        asked = [self.keys[i:j, 0].tolist() for i, j in zip(self.begins, self.ends, strict=True)]
        for row, keys in enumerate(asked):
            vectors = [self.table.rows.get(key, self.table.default) for key in keys]
            if self.pooling == PoolingCode.NONE:
                self._check_copies(row, vectors)
            else:
                first = self.first_weights[row]
                weights = np.ones(len(keys)) if self.weights is None else self.weights[first : first + len(keys)]
                tolerance = 2e-5 if self.out.dtype == np.float32 else 2e-3
                expected = self._pooled(vectors, weights)
                np.testing.assert_allclose(self.out[row], expected, rtol=tolerance, atol=tolerance)
        return [i for i, key in enumerate(chain.from_iterable(asked)) if key not in self.table.rows]

    def _check_copies(self, row: int, vectors: list[Any]) -> None:
        for found, vector in zip(self.out[row].reshape(-1, self.dim), vectors, strict=True):
            if vector is None:
                assert np.isnan(found).all()
            else:
                np.testing.assert_array_equal(found, vector.astype(found.dtype))

    @np.errstate(invalid="ignore")  # the difference of infinities
    def _pooled(self, vectors: list[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
        if not vectors:
            return np.zeros(self.dim)
        rows = np.array([np.zeros(self.dim) if vector is None else vector for vector in vectors], np.float64)
        rows *= weights[:, None]
        if self.pooling == PoolingCode.MAX:
            return np.asarray(rows.max(axis=0))
        return np.asarray(rows.sum(axis=0) / (len(rows) if self.pooling == PoolingCode.MEAN else 1))


def tables_of(gpu: EmulatedGpu, rng: np.random.Generator, dtypes: tuple[str, ...]) -> list[LookedUp]:
    """Tables of all dimensions, of row numbers or keys near each other or any; some have default vectors, or caches."""
    tables = []
    for i, dim in enumerate(DIMS):
        default = rng.standard_normal(dim).astype(np.float32) if i % 3 else None
        table = numbered(rng, dim, str(rng.choice(dtypes)), default)
        if i % 4 == 1:
            put_in_front(gpu, rng, table, rng.integers(0, NUM_ROWS, 120), dim)
        elif i % 4 == 0:
            keys = (
                rng.permutation(np.arange(-20, NUM_ROWS - 20)) if i % 8 else rng.integers(-(2**63), 2**63 - 1, NUM_ROWS)
            )
            give_keys(gpu, table, keys)
            if i % 3:
                put_in_front(gpu, rng, table, rng.choice(keys, 100), dim)
        elif i % 4 == 2:
            table.record["num_row_numbers"] = table.record["num_base_rows"] = 0
            table.rows.clear()
            any_keys = np.array([*UNKNOWN[:2], *rng.integers(-(2**63), 2**63 - 1, 300)])
            put_in_front(gpu, rng, table, any_keys if i % 8 == 2 else rng.integers(-20, 200, 300), dim)
        tables.append(table)
    return tables


def divide(table: LookedUp) -> None:
    """Let each of two GPUs have every other row of a table of row numbers."""
    row_bytes = int(table.record["base_rows"]["row_bytes"])
    rows = table.held[0].reshape(NUM_ROWS, row_bytes)
    shards = [aligned(rows[i::2].nbytes) for i in range(2)]
    for i, shard in enumerate(shards):
        shard[:] = rows[i::2].reshape(-1)
    rows[:] = 0
    table.record["shard_addresses"][:2] = [address_of(shard) for shard in shards]
    table.record["base_rows"]["vectors_address"] = address_of(shards[0])
    table.held += shards


def look_all_up(
    gpu: EmulatedGpu,
    rng: np.random.Generator,
    tables: list[LookedUp],
    num_segments: int,
    pooled: bool,
    *,
    dtypes: tuple[type[np.floating[Any]], ...] = (np.float32,),
    in_order: bool = False,
) -> None:
    """One look-up of random segments with outputs of these types, checked."""
    kinds = [PoolingCode.NONE, PoolingCode.SUM, PoolingCode.MEAN, PoolingCode.MAX] if pooled else [PoolingCode.NONE]
    asked = [
        Asked(
            rng, tables, int(rng.integers(len(tables))), kinds[i % len(kinds)], dtypes[int(rng.integers(len(dtypes)))]
        )
        for i in range(num_segments)
    ]
    segments = np.concatenate([each.segment for each in asked])
    num_unknown = np.zeros(len(segments) * records.COUNT_STRIDE, np.uint64)
    table_records = np.zeros(len(tables), GPU_TABLE)
    table_records[:] = [table.record for table in tables]
    row_bytes = table_records["base_rows"]["row_bytes"].clip(1)
    regions = records.regions_of(segments, table_records["num_base_rows"], row_bytes) if in_order else None
    assert (regions is not None) == in_order
    tiles = records.divide(segments)
    missing_bits = np.zeros(tiles.first[-1], np.uint32)
    gpu.look_up(
        segments,
        table_records,
        num_unknown=num_unknown,
        missing_bits=missing_bits,
        seed=int(rng.integers(2**32)),
        regions=regions,
    )
    missing = [each.check() for each in asked]
    assert num_unknown[:: records.COUNT_STRIDE].tolist() == [len(places) for places in missing]
    noted = np.zeros_like(missing_bits)
    for s, places in enumerate(missing):
        ordered = regions is not None and regions.begins[s] != records.NOT_ORDERED
        for place in places if segments["pooling"][s] == PoolingCode.NONE and not ordered else ():
            noted[tiles.first[s] + place // tiles.keys_per_tile] |= np.uint32(1 << place % tiles.keys_per_tile)
    np.testing.assert_array_equal(missing_bits, noted)


@pytest.mark.parametrize("bags_per_tile", [1, 8])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("num_segments", [6, 35])
def test_rows_in_float32(
    plain: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, num_segments: int, pooled: bool, bags_per_tile: int
) -> None:
    """Segments that lie in the launch's parameters, and more; with tiles of one bag, and of several."""
    if bags_per_tile > 1:
        monkeypatch.setattr(records, "_LEAST_POOLED_TILES", 1)
    rng = np.random.default_rng(zlib.crc32(f"{num_segments} {pooled} {bags_per_tile}".encode()))
    tables = tables_of(plain, rng, ("float32",))
    for _ in range(3):
        look_all_up(plain, rng, tables, num_segments, pooled)


@pytest.mark.parametrize("pooled", [False, True])
def test_rows_of_all_types(narrow: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, pooled: bool) -> None:
    monkeypatch.setattr(records, "_LEAST_POOLED_TILES", 1)
    rng = np.random.default_rng(pooled)
    tables = tables_of(narrow, rng, ("int8", "float16", "float32"))
    for table in tables:
        if table.record["num_row_numbers"] and rng.random() < 0.5:
            divide(table)
    for _ in range(3):
        look_all_up(narrow, rng, tables, 16, pooled, dtypes=(np.float32, np.float16))


@pytest.mark.parametrize("pooled", [False, True])
def test_keys_in_order(ordering: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, pooled: bool) -> None:
    """Those of tables of row numbers, next to others that are taken as they come."""
    for name in ("_LEAST_ORDERED_KEYS", "_LEAST_ORDERED_BYTES"):
        monkeypatch.setattr(records, name, 0)
    monkeypatch.setattr(records, "_LEAST_REGION_BYTES", 1 << 10)
    rng = np.random.default_rng(pooled)
    look_all_up(ordering, rng, tables_of(ordering, rng, ("float32",)), 16, pooled, in_order=True)


@pytest.mark.parametrize("pooled", [False, True])
def test_rows_that_change(changing: EmulatedGpu, pooled: bool) -> None:
    """The cache holds what was changed; a deleted key has its default vector again, whatever its row below."""
    rng = np.random.default_rng(pooled)
    dim, default = 32, rng.standard_normal(32).astype(np.float32)
    table = numbered(rng, dim, "float32", default)
    put_in_front(changing, rng, table, rng.integers(0, NUM_ROWS, 60), dim)
    held = held_keys(table.record["cached"])
    marks = np.ctypeslib.as_array((ctypes.c_uint8 * 256).from_address(int(table.record["cached"]["marks_address"])))
    marks[:] = 1
    deleted = np.array([*sorted(held)[:20], NUM_ROWS + 5])
    changing.mark_deleted(np.array(table.record["cached"]), deleted)
    for key in deleted[:20].tolist():
        del table.rows[key], table.rows[key - NUM_ROWS]
    look_all_up(changing, rng, [table], 8, pooled)


def test_erased_keys(plain: EmulatedGpu) -> None:
    """They are gone, and what was below the cache is seen again."""
    rng = np.random.default_rng(3)
    table = numbered(rng, 16, "float32", None)
    before = dict(table.rows)
    put_in_front(plain, rng, table, rng.integers(0, NUM_ROWS, 100), 16)
    held, events = held_keys(table.record["cached"]), np.zeros(8, np.uint64)
    erased = np.array([*sorted(held)[::2], -5, NUM_ROWS])
    plain.erase(np.array(table.record["cached"]), events, erased)
    assert events[3] == len(erased) - 2
    assert held_keys(table.record["cached"]) == held - set(erased.tolist())
    for key in erased[:-2].tolist():
        table.rows[key] = table.rows[key - NUM_ROWS] = before[key]
    look_all_up(plain, rng, [table], 6, pooled=True)


@pytest.mark.parametrize("dim", [16, 32, 68, 128, 256])
def test_a_bag_has_the_same_sum_wherever_it_lies(plain: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    """To the last bit: alone, and among others in a tile."""
    rng = np.random.default_rng(dim)
    table = numbered(rng, dim, "float32", None)
    bags = [rng.integers(0, NUM_ROWS, length) for length in (0, 0, 3, 40, 1, 0, 75, 33, 2, 64, 9, 31, 32, 5, 0)]
    alone = [pooled(plain, table, [bag], dim)[0] for bag in bags]
    monkeypatch.setattr(records, "_LEAST_POOLED_TILES", 1)
    np.testing.assert_array_equal(pooled(plain, table, bags, dim), alone)


def pooled(gpu: EmulatedGpu, table: LookedUp, bags: list[NDArray[np.int64]], dim: int) -> NDArray[np.float32]:
    """The sums of bags."""
    lengths = np.array([len(bag) for bag in bags])
    keys, ends, out = np.concatenate([*bags, [0]]), np.cumsum(lengths), aligned(4 * dim * len(bags)).view(np.float32)
    begins = ends - lengths
    segment = np.zeros(1, SEGMENT)
    segment["keys_address"], segment["key_bytes"], segment["key_stride"] = address_of(keys), 8, 8
    segment["begins_address"], segment["ends_address"] = address_of(begins), address_of(ends)
    segment["num_rows"], segment["keys_per_row"], segment["pooling"] = len(bags), 1, PoolingCode.SUM
    segment["output_address"], segment["output_stride"] = address_of(out), 4 * dim
    gpu.look_up(segment, table.record.reshape(1))
    return out.reshape(len(bags), dim)
