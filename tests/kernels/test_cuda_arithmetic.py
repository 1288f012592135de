"""The GPU kernels' index arithmetic, by its model in Python, and that Python and CUDA mean the same records."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_session.kernels.cpu.vectors import SUM_BLOCK
from inference_session.kernels.cuda import records as gpu_layout
from inference_session.kernels.cuda.records import MAX_BAGS_PER_TILE, MAX_KEYS_PER_TILE, SLOTS, divide, request_of
from inference_session.kernels.cuda.source import FILES
from inference_session.kernels.records import SEGMENT, VECTOR_COPY, PoolingCode
from inference_session.model_spec import TableSpec
from inference_session.tables.row_numbers import stored_keys
from tests.testing import cuda_model as gpu_model

CUDA = Path(gpu_layout.__file__).parent
HASH_ROWS = ("layout.cuh", "index.cuh", "../../../hotrow/training/kernels/hash_rows.cu")
NO_CODE = "-fdevice-syntax-only"
"""Finds what is wrong in any language construct, templates that are used included, and translates nothing."""
EVERY_CONSTANT = ["-DNUM_SHARDS=2", "-DROWS_CHANGE=1", "-DNARROW_ROWS=1", "-DNARROW_OUTPUTS=1", "-DIN_ORDER=1"]
RECORDS = {
    "Index": gpu_layout.INDEX,
    "Rows": gpu_layout.ROWS,
    "Samples": gpu_layout.SAMPLES,
    "Table": gpu_layout.GPU_TABLE,
    "Segment": SEGMENT,
    "Request": gpu_layout.REQUEST,
    "Target": gpu_layout.TARGET,
    "Batch": gpu_layout.BATCH,
    "VectorCopy": VECTOR_COPY,
}


@settings(max_examples=50)
@given(key=st.integers(-(2**63), 2**63 - 1), num_buckets=st.integers(1, 2**32 // SLOTS))
def test_every_key_has_a_bucket_and_a_tag(key: int, num_buckets: int) -> None:
    """Buckets are in range, and tags never those that mean free or busy."""
    hashed = gpu_model.hash_key(key)
    assert 0 <= gpu_model.bucket_of(hashed, num_buckets) < num_buckets
    assert 1 <= gpu_model.tag_of(hashed) <= 254


@settings(max_examples=50)
@given(
    key=st.integers(-(2**63), 2**63 - 1) | st.integers(-1000, 2**36),
    num_buckets=st.integers(1, 2**32 // SLOTS) | st.integers(1, 30),
    first_key=st.integers(-(2**63), 2**63 - 1) | st.integers(-1000, 1000),
)
def test_every_key_has_a_place(key: int, num_buckets: int, first_key: int) -> None:
    """In an index of any size whose keys begin anywhere; those from the first on are alone in theirs."""
    bucket, tag, alone = gpu_model.place_of(key, num_buckets, first_key)
    assert 0 <= bucket < num_buckets
    assert 1 <= tag <= 254
    num_alone = 1 << (num_buckets * 254).bit_length() - 1
    assert alone == ((key - first_key) % 2**64 < num_alone)
    assert num_alone > 127 * num_buckets


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 5, 7, 8, 64, 100, 129, 255])
def test_no_two_keys_from_the_first_on_share_a_place(num_buckets: int) -> None:
    """So that a tag says which of them a slot holds. Buckets get about as many of the keys, and tags as well."""
    bits = (num_buckets * 254).bit_length() - 1
    places = [gpu_model.place_of(key - 5, num_buckets, -5) for key in range(1 << bits)]
    assert len(set(places)) == len(places)

    some = np.array([place[:2] for place in places[: len(places) // 4]])
    per_bucket = np.bincount(some[:, 0], minlength=num_buckets)
    assert per_bucket.max() <= 1.6 * max(per_bucket.mean(), 20)
    assert np.bincount(some[:, 1] // 64).max() <= 0.4 * len(some) + 20


@settings(max_examples=50)
@given(key=st.integers(-(2**63), 2**63 - 1) | st.integers(-12, 12), num_rows=st.integers(0, 11))
def test_a_row_has_one_key(key: int, num_rows: int) -> None:
    """A negative key means another one only where it is a row number of the table; on the host it is the same one."""
    stored = gpu_model.stored_key(key, num_rows)
    assert stored == (range(num_rows)[key] if -num_rows <= key < 0 else key)
    spec = TableSpec("t", "t", num_rows, 1, keys="row_number" if num_rows else "stored")
    assert stored_keys(spec, np.array([key])).tolist() == [stored]


def test_keys_spread_evenly() -> None:
    """Consecutive keys fall into buckets and tags as random ones would."""
    hashes = [gpu_model.hash_key(key) for key in range(-5000, 5000)]
    buckets = np.bincount([gpu_model.bucket_of(h, 100) for h in hashes], minlength=100)
    tags = np.bincount([gpu_model.tag_of(h) for h in hashes], minlength=255)[1:]
    assert 60 < buckets.min() <= buckets.max() < 140
    assert 15 < tags.min() <= tags.max() < 70


@pytest.mark.parametrize(("num_rows", "most_bytes"), [(1, 1000), (1000, 25), (10**6, 26), (10**7, 28), (10**9, 32)])
def test_an_index_is_small_and_nearly_always_large_enough(num_rows: int, most_bytes: int) -> None:
    """All keys of a table find room in their buckets, of which one slot is kept free, at few bytes a row."""
    num_buckets = gpu_layout.buckets_for_all(num_rows)
    assert gpu_layout.index_bytes(num_buckets, marks=False, numbers=True) <= most_bytes * num_rows
    assert num_buckets < gpu_layout.MOST_BUCKETS
    if num_rows <= 10**6:
        generator = np.random.default_rng(num_rows)
        failed = [
            np.bincount(generator.integers(0, num_buckets, num_rows), minlength=num_buckets).max() >= SLOTS
            for _ in range(5)
        ]
        assert sum(failed) <= 2


@settings(max_examples=50)
@given(bucket=st.binary(min_size=64, max_size=64), tag=st.integers(0, 255))
def test_the_slots_of_a_tag_are_found(bucket: bytes, tag: int) -> None:
    """The same as by plain comparison, whatever the other bytes are; the last two bytes are not slots."""
    found = list(gpu_model.candidates(gpu_model.match_slots(bucket, tag)))
    assert found == [slot for slot in range(SLOTS) if bucket[slot] == tag]


@settings(max_examples=50)
@given(slots=st.integers(1, 2**SLOTS - 1), start=st.integers(0, SLOTS - 1))
def test_a_search_goes_round_the_bucket(slots: int, start: int) -> None:
    """The slot that is taken is the first one at or after the start, else the first of all."""
    held = [slot for slot in range(SLOTS) if slots >> slot & 1]
    assert gpu_model.first_from(slots, start) == next((slot for slot in held if slot >= start), held[0])


@pytest.mark.parametrize("bits", range(16))
def test_bits_become_bytes(bits: int) -> None:
    """One byte of 0 or 1 for each of four bits, which the marks of passed slots are lowered by."""
    assert gpu_model.spread(bits).to_bytes(4, "little") == bytes(bits >> i & 1 for i in range(4))


@settings(max_examples=50)
@given(first=st.integers(0, 2**32 - 1), second=st.integers(0, 2**32 - 1))
def test_lanes_are_ordered_by_class(first: int, second: int) -> None:
    """Each lane occurs once: those of the first set, of the second, then the others, each set in its old order."""
    order = gpu_model.in_order(first, second & ~first)
    rank = [0 if first >> lane & 1 else 1 if second >> lane & 1 else 2 for lane in range(gpu_model.LANES)]
    assert order == sorted(range(gpu_model.LANES), key=lambda lane: rank[lane])


@settings(max_examples=50)
@given(dim=st.integers(1, 300), num_keys=st.integers(0, 32), in_flight=st.sampled_from([1, 4, 8]))
def test_every_element_is_copied_once(dim: int, num_keys: int, in_flight: int) -> None:
    """All lanes together copy each element of each row exactly once, four at a time or one by one."""
    for steps in {dim, max(dim // 4, 1)}:
        copied = list(gpu_model.copied(steps, num_keys, in_flight))
        assert sorted(copied) == [(key, step) for key in range(num_keys) for step in range(steps)]


@pytest.mark.parametrize("width", [8, 16, 32])
def test_every_element_of_a_whole_tile_is_copied_once(width: int) -> None:
    """Each lane's row goes to the vector of the lane's number."""
    copied = [*gpu_model.copied_tile(width, in_flight=8)]
    assert sorted(copied) == [(key, key, step) for key in range(gpu_model.LANES) for step in range(width)]


@settings(max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 80), st.booleans()), min_size=1, max_size=80),
)
def test_tiles_cover_the_keys(sizes: list[tuple[int, int, bool]]) -> None:
    """Every key of a segment, and every bag of a pooled one, is in one tile; no tile is empty or too large."""
    segments = np.zeros(len(sizes), SEGMENT)
    for segment, (num_rows, keys_per_row, pooled) in zip(segments, sizes, strict=True):
        segment["num_rows"], segment["keys_per_row"] = num_rows, keys_per_row
        segment["pooling"] = PoolingCode.SUM if pooled else PoolingCode.NONE
    tiles = divide(segments)
    assert 1 <= tiles.keys_per_tile <= MAX_KEYS_PER_TILE
    assert ((tiles.bags_per_tile >= 1) & (tiles.bags_per_tile <= MAX_BAGS_PER_TILE)).all()
    first = tiles.first.tolist()
    for s, (num_rows, keys_per_row, pooled) in enumerate(sizes):
        bags_per_tile = int(tiles.bags_per_tile[s])
        number, at_once = (num_rows, bags_per_tile) if pooled else (num_rows * keys_per_row, tiles.keys_per_tile)
        num_tiles = first[s + 1] - first[s]
        assert num_tiles == -(-number // at_once)
        if number and pooled:  # as the kernel divides them, which knows the number of tiles only
            taken = -(-number // num_tiles)
            assert taken <= bags_per_tile
            assert (num_tiles - 1) * taken < number <= num_tiles * taken
        if number:
            assert {gpu_model.segment_of(first, tile) for tile in (first[s], first[s + 1] - 1)} == {s}
    request = request_of(segments, tiles)
    assert request["num_segments"] == len(sizes)
    assert request["num_tiles"] == first[-1]


@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(0, 90)), min_size=1, max_size=MAX_BAGS_PER_TILE), data=st.data()
)
def test_every_lane_of_a_tile_of_bags_has_a_key(lengths: list[int], data: st.DataObject) -> None:
    """The keys of a tile's bags are one list, in order, wherever each bag begins; the last lanes of it may be idle."""
    begins = [data.draw(st.integers(0, 10_000)) for _ in lengths]
    wanted = [begin + i for begin, length in zip(begins, lengths, strict=True) for i in range(length)]
    assert gpu_model.places_of_keys(begins, lengths) == wanted


@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 100)), min_size=1, max_size=MAX_BAGS_PER_TILE),
    width=st.sampled_from([1, 2, 4, 8, 16, 32]),
)
def test_a_bag_is_added_up_in_one_order_wherever_it_lies(lengths: list[int], width: int) -> None:
    """Blocks of keys, and the groups of lanes that take them, are counted from where the bag begins."""
    for length, pooled in zip(lengths, gpu_model.pool_bags(lengths, width), strict=True):
        groups = 32 // width
        assert pooled == [(key // gpu_model.SUM_BLOCK, key % groups) for key in range(length)]


@pytest.mark.parametrize("file", sorted({*CUDA.glob("*.cu*"), *(CUDA / HASH_ROWS[-1]).resolve().parent.glob("*.cu")}))
def test_sources_are_ascii(file: Path) -> None:
    """CuPy writes sources by the locale encoding, which is ASCII in a backend process whose locale is C."""
    assert file.read_bytes().isascii()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLOTS", gpu_layout.SLOTS),
        ("BUCKET_BYTES", gpu_layout.BUCKET_BYTES),
        ("MAX_INLINE_SEGMENTS", gpu_layout.MAX_INLINE_SEGMENTS),
        ("MAX_SHARDS", gpu_layout.MAX_SHARDS),
        ("MAX_TARGETS", gpu_layout.MAX_TARGETS),
        ("LANES", gpu_layout.WARP),
        ("COUNT_STRIDE", gpu_layout.COUNT_STRIDE),
        ("SUM_BLOCK", SUM_BLOCK),
    ],
)
def test_numbers_are_the_same_in_cuda(name: str, value: int) -> None:
    """Those that Python and CUDA both have to know."""
    text = "".join((CUDA / source).read_text() for source in FILES)
    assert re.findall(rf"constexpr \w+ {name} = (\d+);", text) == [str(value)]


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_the_same_in_cuda(name: str) -> None:
    """Python's records have the sizes and the order of layout.cuh's, whose fields are of 8 or 4 bytes or records."""
    sizes = {"u32": 4, **{known: dtype.itemsize for known, dtype in RECORDS.items()}}
    most = gpu_layout.MAX_INLINE_SEGMENTS
    counts = {
        "": 1,
        "MAX_INLINE_SEGMENTS": most,
        "MAX_INLINE_SEGMENTS + 1": most + 1,
        "MAX_SHARDS": gpu_layout.MAX_SHARDS,
        "MAX_TARGETS": gpu_layout.MAX_TARGETS,
    }
    text = (CUDA / "layout.cuh").read_text()
    body = re.search(rf"struct (?:alignas\(16\) )?{name} {{(.*?)\n}};", text, re.DOTALL)
    assert body is not None
    offset, offsets = 0, []
    for declared in re.findall(r"^  (?:const )?(\w+\*?) \w+(?:\[(.+?)\])?;", body[1], re.MULTILINE):
        size, alignment = sizes.get(declared[0], 8), 4 if declared[0] == "u32" else 8
        count = counts[declared[1]]
        offset = -(-offset // alignment) * alignment
        offsets.append(offset)
        offset += size * count
    fields = RECORDS[name].fields
    assert fields is not None
    assert offsets == [field[1] for field in fields.values()]
    assert -(-offset // 8) * 8 == RECORDS[name].itemsize


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    """CUDA's run-time compiler, which needs no GPU."""
    files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    library = next(file for file in files if file.name.startswith("libnvrtc.so"))
    return ctypes.CDLL(str(library.locate()))


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")
@pytest.mark.parametrize(
    ("architecture", "files", "constants"),
    [
        ("compute_75", FILES, [NO_CODE]),
        ("sm_90", FILES, []),
        ("compute_90", FILES, ["-DNUM_SHARDS=3", NO_CODE]),
        ("compute_90", FILES, ["-DROWS_CHANGE=1", NO_CODE]),
        ("compute_90", FILES, ["-DNARROW_ROWS=1", NO_CODE]),
        ("compute_90", FILES, ["-DNARROW_OUTPUTS=1", NO_CODE]),
        ("compute_90", FILES, ["-DIN_ORDER=1", NO_CODE]),
        ("compute_75", FILES, [*EVERY_CONSTANT, NO_CODE]),
        ("compute_90", FILES, [*EVERY_CONSTANT, NO_CODE]),
        ("compute_75", HASH_ROWS, []),
        ("sm_90", HASH_ROWS, []),
    ],
)
def test_the_kernels_compile(
    nvrtc: ctypes.CDLL, architecture: str, files: tuple[str, ...], constants: list[str]
) -> None:
    """All files as one, as CuPy compiles them: for a GPU older than some instructions asked for, and for an H100; for
    tables of one GPU, and of several; for rows and outputs in float32 alone, and in others; for keys in an order of
    their own. Machine code (sm_90) is made once, as that takes longest: the others are only checked, and run by
    `test_emulated_lookups`.
    """
    source = "\n".join((CUDA / name).read_text() for name in files).encode()
    options = ["-std=c++17", "-ftz=true", "--device-as-default-execution-space", f"-arch={architecture}"]
    options.extend(constants)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    assert not failed, log.value.decode()
    assert nvrtc.nvrtcDestroyProgram(ctypes.byref(program)) == 0
