"""Table files: what is refused, what is answered, and how vectors are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session.errors import InvalidRequestError, ModelFormatError, SessionClosedError, TableNotFoundError
from inference_session.model_spec import ModelSpec, TableSpec, VectorType
from inference_session.parameter_server.file_store import TableFileStore
from inference_session.tables.table_file import TableFile, write_table
from inference_session.version_directory import manifest
from inference_session.version_directory.version import VersionDirectory
from tests.testing.memory_store import MemoryStore

KEYS = np.array([5, -1, np.iinfo(np.int64).min, 0, np.iinfo(np.int64).max, 6, 7])
VECTORS = np.arange(21, dtype=np.float32).reshape(7, 3)
SPEC = TableSpec("t", "t", 7, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small table."""
    write_table(tmp_path, [VECTORS[:4], VECTORS[4:]], keys=[KEYS[:4], KEYS[4:]])
    return tmp_path


def fetch(file: TableFile, keys: list[int]) -> list[float | None]:
    """The first element of each key's vector, None where unknown."""
    out = np.full((len(keys), file.spec.embedding_dim), -9, np.float32)
    found = file.fetch(np.array(keys, np.int64), out)
    assert (out[~found] == -9).all()
    return [float(row[0]) if ok else None for row, ok in zip(out, found, strict=True)]


def test_written_rows_are_fetched(folder: Path) -> None:
    """A table answers its keys, extremes included, and leaves rows of unknown keys untouched."""
    file = TableFile.open(folder, SPEC)
    assert fetch(file, [7, 1, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max]) == [18, None, 3, 6, 12]
    np.testing.assert_array_equal(file.vectors, VECTORS)
    np.testing.assert_array_equal(file.keys(), KEYS)


@pytest.mark.parametrize("num_rows", [0, 1])
@pytest.mark.parametrize("stored", [False, True])
def test_tables_of_no_and_of_one_row_work(num_rows: int, stored: bool, tmp_path: Path) -> None:
    """The smallest tables open and answer."""
    vectors, keys = VECTORS[:num_rows], np.zeros(num_rows, np.int64)
    write_table(tmp_path, [vectors], keys=[keys] if stored else None)
    spec = TableSpec("t", "t", num_rows, 3, keys="stored" if stored else "row_number")
    file = TableFile.open(tmp_path, spec)
    assert fetch(file, [0, 1, 2]) == [0.0 if num_rows else None, None, None]


def test_row_numbers_count_from_the_end_when_negative(tmp_path: Path) -> None:
    """Without a `key` file a key is the row, -1 the last one; outside there is nothing."""
    write_table(tmp_path, [VECTORS])
    file = TableFile.open(tmp_path, TableSpec("t", "t", 7, 3, keys="row_number"))
    assert fetch(file, [0, 6, 7, -1, -7, -8]) == [0, 18, None, 18, 0, None]
    assert file.keys().tolist() == list(range(7))
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["key", "emb_vector"])
@pytest.mark.parametrize("change", ["short by 1", "short by a row", "longer", "empty", "absent"])
def test_files_of_another_size_are_refused(name: str, change: str, folder: Path) -> None:
    """The error names the file, the size found and the size expected."""
    path = folder / name
    content = path.read_bytes()
    row = len(content) // 7
    changed = {"short by 1": content[:-1], "short by a row": content[:-row], "longer": content + b"x", "empty": b""}
    path.unlink()
    if change != "absent":
        path.write_bytes(changed[change])
    found = "cannot be read" if change == "absent" else f"{len(changed[change])} bytes, expected {len(content)}"
    with pytest.raises(ModelFormatError, match=f"{name}: .*{found}"):
        TableFile.open(folder, SPEC)


@pytest.mark.parametrize("name", ["key", "index"])
def test_every_flipped_byte_is_harmless(name: str, folder: Path) -> None:
    """With any byte of `key` or `index` changed, no key gets the vector of a row whose key is another."""
    index = (folder / "index").read_bytes()
    original = (folder / name).read_bytes()
    for position in range(len(original)):
        (folder / "index").write_bytes(index)
        (folder / name).write_bytes(flipped(original, position))
        file = TableFile.open(folder, SPEC)
        held = dict(zip(file.keys().tolist(), VECTORS[:, 0].tolist(), strict=True))
        asked = [*KEYS.tolist(), *held, 1, 2, 3]
        answers = fetch(file, asked)
        assert all(answer is None or answer == held[key] for key, answer in zip(asked, answers, strict=True))


def test_every_flipped_byte_of_the_index_is_found(folder: Path) -> None:
    """Opened with `verify_index`, a damaged index is rebuilt; callers that insist on the file get the reason."""
    path = folder / "index"
    original = path.read_bytes()
    for position in range(len(original)):
        path.write_bytes(flipped(original, position))
        with pytest.raises(ModelFormatError, match="index: "):
            TableFile.open(folder, SPEC, must_have_index=True, verify_index=True)
        assert None not in fetch(TableFile.open(folder, SPEC, verify_index=True), KEYS.tolist())
        assert path.read_bytes() == original


def test_a_changed_key_between_the_sampled_ones_is_found(tmp_path: Path) -> None:
    """Without a manifest all keys are compared; with one, its checksum of the keys, and no key is read."""
    write_table(tmp_path, [np.zeros((1000, 1), np.float32)], keys=[np.arange(1000)])
    path = tmp_path / "key"
    before = manifest.sha256_of(path)
    path.write_bytes(flipped(path.read_bytes(), 8 * 100))
    spec = TableSpec("t", "t", 1000, 1)
    TableFile.open(tmp_path, spec, must_have_index=True, key_sha256=before)
    for settings in ({}, {"key_sha256": manifest.sha256_of(path)}, {"key_sha256": before, "verify_index": True}):
        with pytest.raises(ModelFormatError, match="it was built from keys other than those of the `key` file"):
            TableFile.open(tmp_path, spec, must_have_index=True, **settings)  # type: ignore[arg-type]


def flipped(content: bytes, position: int) -> bytes:
    """The content with one byte changed."""
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


def test_of_equal_keys_the_last_wins_and_is_counted(tmp_path: Path) -> None:
    """Duplicate keys in a source are reported, and the last row is the one found."""
    write_table(tmp_path, [VECTORS], keys=[np.array([1, 2, 1, 1, 3, 2, 4])])
    file = TableFile.open(tmp_path, SPEC)
    assert file.num_duplicates == 3
    assert fetch(file, [1, 2, 3, 4]) == [9, 15, 12, 18]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 12), ("float16", 6), ("int8", 11)])
def test_vectors_are_stored_as_asked(dtype: str, size: int, tmp_path: Path) -> None:
    """Each type takes its bytes per row and answers float32."""
    write_table(tmp_path, [VECTORS], dtype=dtype)  # type: ignore[arg-type]
    assert (tmp_path / "emb_vector").stat().st_size == 7 * size
    file = TableFile.open(tmp_path, TableSpec("t", "t", 7, 3, dtype, "row_number"))  # type: ignore[arg-type]
    out = np.zeros((7, 3), np.float32)
    assert file.fetch(np.arange(7), out).all()
    np.testing.assert_allclose(out, VECTORS, atol=0.01)


@pytest.mark.parametrize(
    ("vectors", "keys", "dtype", "message"),
    [
        ([VECTORS], [KEYS[:6]], "float32", "7 vectors and 6 keys"),
        ([VECTORS], [KEYS, KEYS], "float32", "0 vectors and 7 keys"),
        ([VECTORS, VECTORS[:, :2]], None, "float32", "one embedding_dim"),
        ([VECTORS[0]], None, "float32", "one embedding_dim"),
        ([VECTORS], [KEYS.astype(np.uint64)], "float32", "found uint64"),
        ([VECTORS * 1e6], None, "float16", "range of float16"),
        ([np.full((7, 3), np.inf)], None, "int8", "NaN, infinite or beyond 1.7e\\+38"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    vectors: Any, keys: Any, dtype: VectorType, message: str, tmp_path: Path
) -> None:
    """Unequal rows, foreign keys and elements out of range are errors that say so."""
    with pytest.raises(ModelFormatError, match=message):
        write_table(tmp_path, vectors, keys=keys, dtype=dtype)  # type: ignore[arg-type]


def test_fetch_refuses_other_shapes_and_types(folder: Path) -> None:
    """The kernel writes to raw memory, so what does not fit must not reach it."""
    file = TableFile.open(folder, SPEC)
    for keys, out in (
        (np.zeros(2, np.int32), np.zeros((2, 3), np.float32)),
        (np.zeros(2, np.int64), np.zeros((1, 3), np.float32)),
        (np.zeros(2, np.int64), np.zeros((2, 3), np.float64)),
        (np.zeros(2, np.int64), np.zeros((2, 6), np.float32)[:, ::2]),
    ):
        with pytest.raises(InvalidRequestError, match="fetch takes keys int64"):
            file.fetch(keys, out)


def test_a_closed_table_refuses(folder: Path) -> None:
    """After `close`, which may be repeated, look-ups are errors; arrays handed out stay good."""
    file = TableFile.open(folder, SPEC)
    vectors = file.vectors
    file.close()
    file.close()
    with pytest.raises(SessionClosedError, match="'t'"):
        fetch(file, [1])
    np.testing.assert_array_equal(vectors, VECTORS)


def test_the_store_knows_folders_alone(tmp_path: Path) -> None:
    """A table whose name is another one's folder does not answer for that one."""
    write_table(tmp_path / "tables" / "a_b", [VECTORS], keys=[KEYS])
    write_table(tmp_path / "tables" / "a_b_2", [2 * VECTORS], keys=[KEYS])
    spec = ModelSpec((), (), (TableSpec("a/b", "a_b", 7, 3), TableSpec("a_b", "a_b_2", 7, 3)), ())

    manifest.write_manifest(tmp_path)
    erased = MemoryStore({"a_b~erased": 1, "a_b_2~erased": 1})
    with TableFileStore(VersionDirectory(tmp_path, spec), erased) as store:
        out = np.zeros((2, 3), np.float32)
        for row, folder in enumerate(store.tables):
            store.fetch(folder, np.array([6]), out[row : row + 1])

        assert out.tolist() == [[15, 16, 17], [30, 32, 34]]
        with pytest.raises(TableNotFoundError, match="has no table 'a/b'; its tables: 'a_b', 'a_b_2'"):
            store.num_rows("a/b")


def test_the_store_reads_all_tables_of_a_version(tmp_path: Path) -> None:
    """A version's tables as a tier, by their folders."""
    write_table(tmp_path / "tables" / "t", [VECTORS], keys=[KEYS])
    spec = ModelSpec((), (), (TableSpec("a/b", "t", 7, 3),), ())
    manifest.write_manifest(tmp_path)
    with TableFileStore(VersionDirectory(tmp_path, spec), MemoryStore({"t~erased": 1})) as store:
        out = np.zeros((1, 3), np.float32)
        assert store.fetch("t", np.array([6]), out).all()
        assert out[0].tolist() == [15, 16, 17]
        assert (store.tables, store.num_rows("t"), store.embedding_dim("t")) == (("t",), 7, 3)
    with pytest.raises(SessionClosedError):
        store.fetch("t", np.array([6]), out)
