"""HugeCTR's formats of training data: what is written is read, record by record, and what is damaged is named."""

from __future__ import annotations

import gc
import json
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotrow.training import hugectr
from hotrow.training.hugectr import tools
from hotrow.training.hugectr.arguments import tuning
from hotrow.training.hugectr.arguments.enums import Check_t, DataReaderType_t, Distribution_t
from hotrow.training.hugectr.readers import batches as reading
from hotrow.training.hugectr.readers.batches import DataReader, batches
from hotrow.training.hugectr.readers.block import Bags, Block
from inference_session.errors import ConfigurationError, ModelFormatError
from tests.testing.hugectr_training_records import Records, make_records, samples_of, shape, source
from tests.testing.servers import wait_until

pytestmark = pytest.mark.training

RANDOM = np.random.default_rng(21)


def norm_bytes(records: Records, key_format: str, *, is_checked: bool) -> bytes:
    """The Norm format as HugeCTR's own DataWriter writes it: with checksums, the header has one too."""
    slots = len(records.slots)
    shapes = len(records.labels), records.labels.shape[1], records.dense.shape[1], slots
    parts = [struct.pack("<8q", int(is_checked), *shapes, 0, 0, 0)]
    for number in range(len(records.labels)):
        labels, dense, keys = records.sample(number)
        body = struct.pack(f"<{len(labels) + len(dense)}f", *labels, *dense)
        body += b"".join(struct.pack(f"<i{len(slot)}{key_format}", len(slot), *slot) for slot in keys)
        parts.append(body)
    if is_checked:
        parts = [struct.pack("<i", len(part)) + part + bytes([sum(part) & 255]) for part in parts]
    return b"".join(parts)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("key_bytes", [4, 8])
@pytest.mark.parametrize("slots", [((3, 4),), ((1, 1), (2, 3)), ((2, 1),)])
def test_norm_files_are_written_and_read_as_their_definition_says(
    tmp_path: Path, is_checked: bool, key_bytes: int, slots: tuple[tuple[int, int], ...]
) -> None:
    record_shape = shape(2, 3, *slots, key_bytes=key_bytes)
    limit = 2**32 if key_bytes == 4 else 2**62
    records = [make_records(RANDOM, count, record_shape, limit=limit) for count in (17, 1, 0, 30)]
    files = [tmp_path / f"{i}.data" for i in range(len(records))]
    key_type = np.dtype("<u4" if key_bytes == 4 else "<i8")
    for file, part in zip(files, records, strict=True):
        tools.write_norm(file, part.labels, part.dense, part.slots, key_type=key_type, is_checked=is_checked)
        assert file.read_bytes() == norm_bytes(part, "I" if key_bytes == 4 else "q", is_checked=is_checked)
    tools.write_file_list(tmp_path / "list.txt", files)

    found = source(tmp_path / "list.txt", record_shape, check=Check_t.Sum if is_checked else Check_t.Non)
    expected = [part.sample(i) for part in records for i in range(len(part.labels))]
    for size in (1, 7, 48, 100):
        cut = list(batches(found, size, repeats=False))
        assert [len(batch) for batch in cut[:-1]] == [size] * (len(cut) - 1)
        assert [sample for batch in cut for sample in samples_of(batch, record_shape)] == expected


def test_in_repeat_mode_batches_go_over_the_end_of_the_data(tmp_path: Path) -> None:
    record_shape = shape(1, 1, (1, 2))
    records = make_records(RANDOM, 5, record_shape, limit=9)
    tools.write_norm(
        tmp_path / "a", records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=False
    )
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "a"])
    reader = DataReader(source(tmp_path / "list.txt", record_shape), 4, repeats=True)
    reader.start()
    found = []
    for _ in range(5):
        batch = reader.next_batch()
        assert batch is not None
        assert len(batch) == 4
        found += samples_of(batch, record_shape)
    reader.stop()
    assert found == [records.sample(i % 5) for i in range(20)]


def test_in_epoch_mode_a_reader_ends_and_starts_again(tmp_path: Path) -> None:
    record_shape = shape(1, 0, (2, 1))
    records = make_records(RANDOM, 10, record_shape, limit=100, is_fixed=True)
    for name in ("a", "b"):
        tools.write_norm(
            tmp_path / name, records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=False
        )
        tools.write_file_list(tmp_path / f"{name}.txt", [tmp_path / name])
    reader = DataReader(source(tmp_path / "a.txt", record_shape), 8, repeats=False)
    assert not reader.is_started()
    for place in ("", "", str(tmp_path / "b.txt")):
        reader.set_source(place)
        sizes = [len(batch) for batch in iter(reader.next_batch, None)]
        assert sizes == [8, 2]
        assert reader.is_eof()
    reader.stop()


def test_what_was_read_ahead_is_forgotten_where_a_reader_starts_again(tmp_path: Path) -> None:
    record_shape = shape(1, 0, (1, 1))
    records = make_records(RANDOM, 1000, record_shape, limit=100, is_fixed=True)
    tools.write_norm(
        tmp_path / "a", records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=False
    )
    tools.write_file_list(tmp_path / "a.txt", [tmp_path / "a"])
    pieces: list[weakref.ref[Block]] = []

    def noted(piece: Block) -> Block:
        pieces.append(weakref.ref(piece))
        return piece

    reader = DataReader(source(tmp_path / "a.txt", record_shape), 8, repeats=False, prepare=noted)
    reader.set_source()
    assert reader.next_batch() is not None
    wait_until(lambda: len(pieces) > 4, "pieces that wait in the queue")
    reader.stop()
    gc.collect()
    assert not any(piece() for piece in pieces)


@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("most", [1, 3])
def test_raw_files_are_read_with_their_own_numbers(tmp_path: Path, is_float: bool, most: int) -> None:
    record_shape = shape(1, 3, (2, most), (1, most), key_bytes=4)
    records = make_records(RANDOM, 50, record_shape, limit=2**32, is_fixed=True)
    path = tmp_path / "data.bin"
    slots = [bags.keys.reshape(50, most) for bags in records.slots]
    tools.write_raw(path, records.labels, records.dense, slots, is_float=is_float)
    found = source(path, record_shape, DataReaderType_t.Raw, num_samples=50, float_label_dense=is_float)
    (block,) = found.blocks()
    dense = records.dense if is_float else np.log(records.dense + 1)
    np.testing.assert_array_equal(block.dense, dense)
    np.testing.assert_array_equal(block.labels, records.labels)
    keys = [sample[2] for sample in samples_of(block, record_shape)]
    assert keys == [records.sample(i)[2] for i in range(50)]


def test_raw_files_whose_slots_may_have_one_key_or_several_are_not_guessed(tmp_path: Path) -> None:
    """Six records with two keys in each of four slots have the bytes of nine with one key."""
    record_shape, path = shape(1, 3, (4, 2), key_bytes=4), tmp_path / "data.bin"
    path.write_bytes(bytes(6 * 48))

    def keys_in_slots(num_samples: int) -> set[int]:
        (block,) = source(path, record_shape, DataReaderType_t.Raw, num_samples=num_samples).blocks()
        assert len(block) == num_samples
        return set(np.diff(block.bags[0].offsets).tolist())

    assert keys_in_slots(6) == {2}
    assert keys_in_slots(9) == {1}
    for num_samples in (0, 5):
        reader = source(path, record_shape, DataReaderType_t.Raw, num_samples=num_samples)
        with pytest.raises(ModelFormatError, match="288 bytes are 9 records with one key in each slot, or 6 with"):
            list(reader.blocks())
    path.write_bytes(bytes(7 * 48))
    assert keys_in_slots(5) == {2}
    path.write_bytes(bytes(10 * 32))
    assert keys_in_slots(5) == {1}


@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("key_bytes", [4, 8])
def test_multi_hot_records_have_all_keys_of_their_slots(tmp_path: Path, is_float: bool, key_bytes: int) -> None:
    """Labels are integers; dense features are integers or float32; keys have 4 bytes or 8."""
    record_shape = shape(1, 3, (1, 2), (1, 1), (1, 3), key_bytes=key_bytes)
    low = 0 if key_bytes == 4 else -(2**63)
    records = make_records(RANDOM, 50, record_shape, limit=2**32 if key_bytes == 4 else 2**63 - 1, is_fixed=True)
    slots = [bags.keys + low // 2 for bags in records.slots]
    numbers = [("<i4", records.labels), ("<f4" if is_float else "<i4", records.dense)]
    parts = [number.astype(kind).view(np.uint8).reshape(50, -1) for kind, number in numbers]
    parts += [keys.astype(f"<i{key_bytes}").view(np.uint8).reshape(50, -1) for keys in slots]
    path = tmp_path / "data.bin"
    np.concatenate(parts, axis=1).tofile(path)
    options = tuning.AsyncParam(1, 4, multi_hot_reader=True, is_dense_float=is_float)
    reader = source(path, record_shape, DataReaderType_t.RawAsync, num_samples=50, async_param=options)
    (block,) = reader.blocks()
    np.testing.assert_array_equal(block.labels, records.labels)
    np.testing.assert_array_equal(block.dense, records.dense if is_float else np.log(records.dense + 1))
    for bags, keys in zip(block.bags, slots, strict=True):
        np.testing.assert_array_equal(bags.keys, keys)
    with pytest.raises(ModelFormatError, match=f"expected 51 records of {4 * 4 + 6 * key_bytes} bytes"):
        list(replace(reader, num_samples=51).blocks())


def write_parquet_folder(folder: Path, records: list[Records], **metadata: object) -> Path:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{i}.parquet" for i in range(len(records))]
    for file, part in zip(files, records, strict=True):
        tools.write_parquet(file, part.labels, part.dense, part.slots, rows_per_group=13)
    first = records[0]
    params = tools.DataGeneratorParams(
        DataReaderType_t.Parquet, first.labels.shape[1], first.dense.shape[1], len(first.slots), True, "", "",
        [10] * len(first.slots),
    )  # fmt: skip
    tools.write_metadata(folder, {file: len(part.labels) for file, part in zip(files, records, strict=True)}, params)
    tools.write_file_list(folder / "list.txt", files)
    return folder / "list.txt"


def test_parquet_keys_count_per_slot_and_are_offset(tmp_path: Path) -> None:
    record_shape = shape(2, 2, (2, 3), (2, 1))
    records = [make_records(RANDOM, count, record_shape, limit=10) for count in (30, 7)]
    place = write_parquet_folder(tmp_path / "data", records)
    sizes = (10, 0, 10, 10)
    firsts = (0, 10, 10, 20)
    expected = [
        (labels, dense, [[key + first for key in slot] for slot, first in zip(keys, firsts, strict=True)])
        for part in records
        for labels, dense, keys in map(part.sample, range(len(part.labels)))
    ]
    found = source(place, record_shape, DataReaderType_t.Parquet, slot_size_array=sizes)
    assert [s for batch in batches(found, 8, repeats=False) for s in samples_of(batch, record_shape)] == expected
    unshifted = source(place, record_shape, DataReaderType_t.Parquet)
    (first_sample, *_) = samples_of(next(iter(unshifted.blocks())), record_shape)
    assert first_sample == records[0].sample(0)


def test_parquet_columns_may_be_plain_or_lists(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {
        "clicked": pa.array([1, 0], pa.int8()),
        "prices": pa.array([[1.5, 2.5], [3.5, 4.5]]),
        "user": pa.array([3, 4], pa.int32()),
        "history": pa.array([[1, 2, 3], []], pa.large_list(pa.int64())),
    }
    pq.write_table(pa.table(table), tmp_path / "0.parquet")
    document = {
        "labels": [{"col_name": "clicked", "index": 0}],
        "conts": [{"col_name": "prices", "index": 1}],
        "cats": [{"col_name": "user", "index": 2}, {"col_name": "history", "index": 3}],
    }
    (tmp_path / "_metadata.json").write_text(json.dumps(document))
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "0.parquet"])
    record_shape = shape(1, 2, (1, 1), (1, 3))
    (block,) = source(tmp_path / "list.txt", record_shape, DataReaderType_t.Parquet).blocks()
    assert samples_of(block, record_shape) == [([1.0], [1.5, 2.5], [[3], [1, 2, 3]]), ([0.0], [3.5, 4.5], [[4], []])]


def test_parquet_lists_may_be_of_any_kind(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys, prices = [[1, 2], [3, 4]], [[1.5, 2.5], [3.5, 4.5]]
    document = {name: [{"col_name": name}] for name in ("labels", "conts", "cats")}
    (tmp_path / "_metadata.json").write_text(json.dumps(document))
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "0.parquet"])
    record_shape = shape(1, 2, (1, 2))
    for of in (pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)):
        columns = {
            "labels": pa.array([1, 0]),
            "conts": pa.array(prices, of(pa.float32())),
            "cats": pa.array(keys, of(pa.int32())),
        }
        pq.write_table(pa.table(columns), tmp_path / "0.parquet")
        (block,) = source(tmp_path / "list.txt", record_shape, DataReaderType_t.Parquet).blocks()
        assert samples_of(block, record_shape) == [([1.0], prices[0], [keys[0]]), ([0.0], prices[1], [keys[1]])]
    pq.write_table(
        pa.table(columns | {"cats": pa.array([[1, 2], None], pa.list_(pa.int32(), 2))}), tmp_path / "0.parquet"
    )
    with pytest.raises(ModelFormatError, match="column 'cats': a row has no value"):
        list(source(tmp_path / "list.txt", record_shape, DataReaderType_t.Parquet).blocks())


def test_negative_features_without_a_logarithm_are_named(tmp_path: Path) -> None:
    record_shape = shape(1, 2, (1, 1), key_bytes=4)
    dense = np.array([[0, 1], [2, 3], [4, -1]], np.float32)
    path = tmp_path / "data.bin"
    tools.write_raw(path, np.zeros((3, 1), np.float32), dense, [np.zeros((3, 1), np.int64)], is_float=False)
    found = source(path, record_shape, DataReaderType_t.Raw, num_samples=3)
    with pytest.raises(ModelFormatError, match=r"data\.bin: record 2: the dense feature 1 is -1; integers are read as"):
        list(batches(found, 2, repeats=False))
    for name in ("num_samples", "eval_num_samples"):
        with pytest.raises(ConfigurationError, match=f"DataReaderParams: {name} is -1; allowed: whole numbers from 0"):
            hugectr.DataReaderParams(DataReaderType_t.Raw, "a", "", "b", Check_t.Non, **{name: -1})


def _flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


def _with_header(at: int, value: int) -> Callable[[bytes], bytes]:
    """Another byte in the header, whose checksum agrees."""

    def change(data: bytes) -> bytes:
        header = data[4 : 4 + at] + bytes([value]) + data[4 + at + 1 : 68]
        return data[:4] + header + bytes([sum(header) & 255]) + data[69:]

    return change


NORM_DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a byte of a record": (_flip(85), r"record 0 \(byte 69\): its checksum"),
    "a byte of the header": (_flip(15), r"the header's checksum is not the sum of its bytes"),
    "an early end": (lambda data: data[:-3], "record 19 .*ends within it"),
    "a missing header": (lambda data: data[:10], "10 bytes; a file in Norm format has a header of 69"),
    "an empty file": (lambda _: b"", "0 bytes; a file in Norm format has a header of 69"),
    "bytes behind the end": (lambda data: data + b"123", "3 bytes after its last record"),
    "a negative length": (lambda data: data[:69] + b"\xff\xff\xff\xff" + data[73:], "record 0 .*its length"),
    "a wrong slot count": (_with_header(32, 7), "slot_num 7, the model's Input 2"),
    "a wrong label_dim": (_with_header(16, 3), "label_dim 3"),
    "no checksums promised": (
        lambda data: bytes(1) + data[5:68] + data[69:],
        "check_type Non, DataReaderParams says Sum",
    ),
}


@pytest.mark.parametrize("damage", NORM_DAMAGE)
def test_damage_to_norm_files_is_named(tmp_path: Path, damage: str) -> None:
    record_shape = shape(1, 3, (2, 2))
    records = make_records(RANDOM, 20, record_shape, limit=100, is_fixed=True)
    path = tmp_path / "damaged.data"
    tools.write_norm(path, records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=True)
    change, message = NORM_DAMAGE[damage]
    path.write_bytes(change(path.read_bytes()))
    tools.write_file_list(tmp_path / "list.txt", [path])
    with pytest.raises(ModelFormatError, match=rf"damaged\.data: .*{message}"):
        list(source(tmp_path / "list.txt", record_shape, check=Check_t.Sum).blocks())


def test_a_header_without_its_own_checksum_is_read(tmp_path: Path) -> None:
    """As HugeCTR's manual shows files with checksums, and as 0.1.0 wrote them."""
    record_shape = shape(1, 3, (2, 2))
    records = make_records(RANDOM, 20, record_shape, limit=100, is_fixed=True)
    data = norm_bytes(records, "q", is_checked=True)
    (tmp_path / "a").write_bytes(data[4:68] + data[69:])
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "a"])
    (block,) = source(tmp_path / "list.txt", record_shape, check=Check_t.Sum).blocks()
    assert samples_of(block, record_shape) == [records.sample(i) for i in range(20)]


def test_norm_files_with_other_checksums_than_expected_are_named(tmp_path: Path) -> None:
    record_shape = shape(1, 3, (2, 2))
    records = make_records(RANDOM, 20, record_shape, limit=100, is_fixed=True)
    path = tmp_path / "a"
    tools.write_norm(path, records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=True)
    tools.write_file_list(tmp_path / "list.txt", [path])
    with pytest.raises(ModelFormatError, match="the header says check_type Sum, DataReaderParams says Non"):
        list(source(tmp_path / "list.txt", record_shape, check=Check_t.Non).blocks())


def test_more_keys_than_the_input_allows_are_named(tmp_path: Path) -> None:
    written, read = shape(1, 0, (2, 3)), shape(1, 0, (2, 2))
    records = make_records(RANDOM, 5, written, limit=9, is_fixed=True)
    tools.write_norm(
        tmp_path / "a", records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=False
    )
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "a"])
    with pytest.raises(ModelFormatError, match=r"record 0 .*slot 0 has 3 keys; nnz_per_slot .* allows 2"):
        list(source(tmp_path / "list.txt", read).blocks())
    place = write_parquet_folder(tmp_path / "data", [records])
    with pytest.raises(ModelFormatError, match=r"0\.parquet: row group 0: column 'C1': row 0: 3 keys"):
        list(source(place, read, DataReaderType_t.Parquet).blocks())


def test_raw_files_that_end_early_are_named(tmp_path: Path) -> None:
    record_shape = shape(1, 1, (1, 1), key_bytes=4)
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(12 * 9 + 4))
    with pytest.raises(ModelFormatError, match=r"data\.bin: 112 bytes; expected 10 records of 12 bytes"):
        list(source(path, record_shape, DataReaderType_t.Raw, num_samples=10).blocks())
    with pytest.raises(ModelFormatError, match="a whole number of records"):
        list(source(path, record_shape, DataReaderType_t.Raw).blocks())
    assert len(next(iter(source(path, record_shape, DataReaderType_t.Raw, num_samples=9).blocks()))) == 9


@pytest.mark.parametrize(("key", "sizes"), [(2**32, ()), (-(2**31) - 1, ()), (2**32 - 10, (10, 2**33))])
def test_parquet_keys_beyond_uint32_are_named(tmp_path: Path, key: int, sizes: tuple[int, ...]) -> None:
    """Served, they would be other keys: those that have the same 32 bits."""
    record_shape = shape(1, 1, (2, 2), key_bytes=4)
    records = make_records(RANDOM, 40, record_shape, limit=10, is_fixed=True)
    records.slots[1].keys[2 * 30 + 1] = key
    place = write_parquet_folder(tmp_path / "data", [records])
    message = rf"0\.parquet: row group 2: column 'C2': row 4: key {key}; keys are uint32, .* i64_input_key=True"
    with pytest.raises(ModelFormatError, match=message):
        list(source(place, record_shape, DataReaderType_t.Parquet, slot_size_array=sizes).blocks())


def test_negative_parquet_keys_of_32_bits_are_the_uint32_that_they_are_saved_as(tmp_path: Path) -> None:
    """A run that goes on from saved tables, whose keys are read as uint32, finds its rows again."""
    records = make_records(RANDOM, 40, shape(1, 1, (2, 2)), limit=10, is_fixed=True)
    records.slots[1].keys[2 * 30 + 1] = -9
    place = write_parquet_folder(tmp_path / "data", [records])
    for key_bytes, key in ((4, 2**32 - 9), (8, -9)):
        blocks = list(source(place, shape(1, 1, (2, 2), key_bytes=key_bytes), DataReaderType_t.Parquet).blocks())
        found = np.concatenate([block.bags[0].keys for block in blocks])
        assert found[found != np.clip(found, 0, 9)].tolist() == [key]


def test_keys_outside_slot_size_array_are_named(tmp_path: Path) -> None:
    record_shape = shape(1, 1, (2, 2))
    records = make_records(RANDOM, 40, record_shape, limit=10, is_fixed=True)
    records.slots[1].keys[2 * 30 + 1] = 10
    place = write_parquet_folder(tmp_path / "data", [records])
    with pytest.raises(
        ModelFormatError, match=r"0\.parquet: row group 2: column 'C2': row 4: key 10; slot_size_array allows 0 to 9"
    ):
        list(source(place, record_shape, DataReaderType_t.Parquet, slot_size_array=(10, 10)).blocks())
    with pytest.raises(ModelFormatError, match="3 elements; the model's Input has 2 slots"):
        list(source(place, record_shape, DataReaderType_t.Parquet, slot_size_array=(1, 2, 3)).blocks())


def test_metadata_that_does_not_fit_is_named(tmp_path: Path) -> None:
    record_shape = shape(1, 2, (2, 1))
    place = write_parquet_folder(tmp_path / "data", [make_records(RANDOM, 20, record_shape, limit=10, is_fixed=True)])
    metadata = tmp_path / "data" / "_metadata.json"
    good = json.loads(metadata.read_text())

    def refused(document: object, message: str) -> None:
        metadata.write_text(json.dumps(document))
        with pytest.raises(ModelFormatError, match=message):
            list(source(place, record_shape, DataReaderType_t.Parquet).blocks())

    refused({**good, "conts": good["conts"][:1]}, r"does not name the columns \['I2'\]")
    refused({**good, "cats": good["cats"][:1]}, "1 columns; the model's Input has 2 slots")
    refused({**good, "labels": [{"col_name": "other"}]}, r"lacks the columns \['other'\]")
    refused({**good, "file_stats": [{"file_name": "0.parquet", "num_rows": 21}]}, "20 rows; .* says 21")
    refused({**good, "file_stats": [{"file_name": "9.parquet", "num_rows": 20}]}, "does not name the file")
    refused({**good, "labels": "label"}, "list of objects with 'col_name'")
    metadata.unlink()
    with pytest.raises(ConfigurationError, match=r"_metadata\.json: no such file"):
        list(source(place, record_shape, DataReaderType_t.Parquet).blocks())


def test_damaged_parquet_files_and_missing_values_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    record_shape = shape(1, 1, (1, 1))
    place = write_parquet_folder(tmp_path / "data", [make_records(RANDOM, 20, record_shape, limit=10, is_fixed=True)])
    path = tmp_path / "data" / "0.parquet"
    table = pq.read_table(path)
    holes = table.set_column(2, "C1", pa.array([None, *range(19)], pa.int64()))
    pq.write_table(holes, path)
    with pytest.raises(ModelFormatError, match="row group 0: column 'C1': a row has no value"):
        list(source(place, record_shape, DataReaderType_t.Parquet).blocks())
    pq.write_table(table.set_column(2, "C1", pa.array([0.5] * 20)), path)
    with pytest.raises(ModelFormatError, match="elements of type double; integers are required"):
        list(source(place, record_shape, DataReaderType_t.Parquet).blocks())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelFormatError, match=r"0\.parquet: cannot be read as Parquet"):
        list(source(place, record_shape, DataReaderType_t.Parquet).blocks())


def test_damaged_pages_of_parquet_files_are_named_by_their_row_group(tmp_path: Path) -> None:
    """By their checksums, where the writer made them, or as their headers cannot be read."""
    import pyarrow.parquet as pq

    record_shape = shape(1, 1, (1, 1))
    place = write_parquet_folder(tmp_path / "data", [make_records(RANDOM, 20, record_shape, limit=10, is_fixed=True)])
    path = tmp_path / "data" / "0.parquet"
    table = pq.read_table(path)
    for has_checksums in (True, False):
        pq.write_table(
            table, path, row_group_size=10, use_dictionary=False, compression="none", write_page_checksum=has_checksums
        )
        column = pq.ParquetFile(path).metadata.row_group(1).column(1)
        damaged = bytearray(path.read_bytes())
        damaged[column.data_page_offset + (column.total_compressed_size - 4 if has_checksums else 0)] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(ModelFormatError, match=r"0\.parquet: row group 1: cannot be read as Parquet: [^\n]+$"):
            list(source(place, record_shape, DataReaderType_t.Parquet).blocks())


def test_a_file_that_is_missing_is_named_with_its_list(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("1\nnowhere\n")
    with pytest.raises(ConfigurationError, match=r"nowhere: no such file \(.*list\.txt names it\)"):
        list(source(tmp_path / "list.txt", shape(1, 1, (1, 1))).blocks())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x\n", "begins with"),
        ("2\na\n", "says 2 files"),
        ("", "nothing"),
        ("9" * 5000 + "\na\n", "begins with"),
        ("²\na\n", "begins with"),
    ],
    ids=["a word", "fewer files", "nothing", "too many digits", "a digit of another kind"],
)
def test_file_lists_that_are_none_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ModelFormatError, match=message):
        list(source(tmp_path / "list.txt", shape(1, 1, (1, 1))).blocks())


@pytest.mark.parametrize("num_at_once", [1, 2, 3])
def test_a_piece_begins_while_batches_before_it_are_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_at_once: int
) -> None:
    """If it was read by then; each begins once, its batches are in their order, and the end is still the end."""
    record_shape = shape(1, 1, (1, 1))
    records = make_records(RANDOM, 10, record_shape, limit=9)
    tools.write_norm(
        tmp_path / "a", records.labels, records.dense, records.slots, key_type=np.dtype("<i8"), is_checked=False
    )
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "a"])
    monkeypatch.setattr(reading, "_PIECE_BYTES", num_at_once * 4 * 16)  # a label, a dense feature and a key: 16 bytes
    begun: list[Block] = []
    reader = DataReader(
        source(tmp_path / "list.txt", record_shape), 4, repeats=False, begin=lambda block: begun.append(block) or block
    )
    num_pieces = -(-10 // (4 * num_at_once))
    for _ in range(2):
        begun.clear()
        others = set(threading.enumerate())
        reader.set_source()
        for thread in set(threading.enumerate()) - others:  # three batches and the end fit the queue
            thread.join()
        given = []
        for number in range(3):
            given.append(reader.next_batch())
            assert len(begun) == min(number // num_at_once + 2, num_pieces)
        assert not reader.is_eof()
        assert reader.next_batch() is None
        assert reader.is_eof()
        found = [sample for batch in given if batch is not None for sample in samples_of(batch, record_shape)]
        assert found == [records.sample(i) for i in range(10)]
    reader.next_batch()
    reader.set_source()
    assert reader.next_batch() is not begun[0]
    reader.stop()


def test_errors_of_the_reading_thread_reach_whoever_asks_for_a_batch(tmp_path: Path) -> None:
    tools.write_file_list(tmp_path / "list.txt", [tmp_path / "nowhere"])
    reader = DataReader(source(tmp_path / "list.txt", shape(1, 1, (1, 1))), 4, repeats=True)
    reader.start()
    with pytest.raises(ConfigurationError, match="nowhere: no such file"):
        reader.next_batch()
    reader.stop()
    reader.stop()


@pytest.mark.parametrize("format", [DataReaderType_t.Norm, DataReaderType_t.Parquet, DataReaderType_t.Raw])
@pytest.mark.parametrize("distribution", [Distribution_t.Uniform, Distribution_t.PowerLaw])
def test_generated_data_can_be_read(tmp_path: Path, format: DataReaderType_t, distribution: Distribution_t) -> None:  # noqa: A002
    nnz = [1, 1] if format is DataReaderType_t.Raw else [2, 1]
    params = tools.DataGeneratorParams(
        format, 1, 3, 2, format is not DataReaderType_t.Raw, str(tmp_path / "train.txt"), str(tmp_path / "eval.txt"),
        [50, 10], nnz_array=nnz, dist_type=distribution, num_files=2, eval_num_files=1, num_samples_per_file=40,
        num_samples=80, eval_num_samples=40,
    )  # fmt: skip
    tools.DataGenerator(params).generate()
    record_shape = shape(1, 3, (2, 2), key_bytes=4 if format is DataReaderType_t.Raw else 8)
    sizes = (50, 10) if format is DataReaderType_t.Parquet else ()
    for name, expected in (("train.txt", 80), ("eval.txt", 40)):
        found = source(
            tmp_path / name, record_shape, format, check=Check_t.Sum, slot_size_array=sizes,
            num_samples=expected if format is DataReaderType_t.Raw else 0,
        )  # fmt: skip
        blocks = list(found.blocks())
        assert sum(map(len, blocks)) == expected
        bags: list[Bags] = [block.bags[0] for block in blocks]
        keys = np.concatenate([each.keys for each in bags])
        assert keys.min() >= 0
        assert keys.max() < 60
