"""Versions with quantized tables: which tables become smaller, what is shared, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.model_spec import ModelSpec, TableSpec, VectorType
from inference_session.rows.base import look_up_keys
from inference_session.rows.files import changing_rows
from inference_session.tables.quantized_rows import dequantize_rows, quantize_rows
from inference_session.tables.table_file import TableFile, write_table
from inference_session.version_directory import manifest
from inference_session.version_directory.quantizing import narrowed, quantize_tables, quantize_version
from tests.testing import small_model
from tests.testing.stored_model import push

UPDATED = np.array([[1 / 3, 1e9, -1e-9, 7]], np.float32)


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """The small model as version 1 of `ctr`."""
    small_model.write(tmp_path / "ctr" / "1")
    return tmp_path / "ctr" / "1"


def write_version(directory: Path, *vectors: np.ndarray) -> ModelSpec:
    """A version of tables alone, by row number."""
    tables = []
    for number, rows in enumerate(vectors):
        write_table(directory / "tables" / f"t{number}", [rows])
        tables.append(TableSpec(f"table {number}", f"t{number}", *rows.shape, keys="row_number"))
    spec = ModelSpec((), (), tuple(tables), ())
    manifest.describe_version(spec, directory)
    return spec


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", ["float32", "float16", "float32"]),
        ("float16", ["float16", "float16", "float16"]),
        ("int8", ["int8", "float16", "float32"]),
    ],
)
def test_only_tables_that_become_smaller_change(dtype: VectorType, expected: list[str]) -> None:
    """An int8 row ends with 8 bytes of scale and bias: rows of 2 and 3 elements would grow."""
    assert [table.dtype for table in narrowed(small_model.SPEC, dtype).tables] == expected


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_are_what_the_types_keep_of_them(dtype: VectorType, version_dir: Path, tmp_path: Path) -> None:
    """Each row of the new version is the old row, stored as the new type; the old version stays unchanged."""
    before = {path: path.read_bytes() for path in version_dir.rglob("*") if path.is_file()}
    quantize_version(version_dir, version_dir.with_name("2"), dtype)

    assert {path: path.read_bytes() for path in before} == before
    manifest.verify(version_dir.with_name("2"), checksums=True)
    with (
        InferenceSession.open(version_dir, device="cpu") as old,
        InferenceSession.open(version_dir.with_name("2"), device="cpu") as new,
    ):
        for table in new.spec.tables:
            vectors = old.lookup(table.folder, np.arange(-8, 9))
            kept = dequantize_rows(quantize_rows(vectors, table.dtype), table.dtype)
            np.testing.assert_allclose(new.lookup(table.folder, np.arange(-8, 9)), kept, rtol=1e-6, atol=1e-7)


def test_unchanged_files_are_shared(version_dir: Path) -> None:
    """Only session.json, the manifest and the vectors of narrowed tables are new."""
    with InferenceSession.open(version_dir, device="cpu"):
        pass  # builds the index
    target = version_dir.with_name("2")
    quantize_version(version_dir, target, "int8")
    own = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file() and path.stat().st_nlink == 1}

    assert own == {"session.json", "MANIFEST.json", "tables/user_weight/emb_vector"}
    assert (target / "tables/hashed/index").stat().st_ino == (version_dir / "tables/hashed/index").stat().st_ino


def test_a_refused_version_leaves_nothing(version_dir: Path) -> None:
    """Neither a version nor a part of one, if `accept` raises."""

    def refuse(_: Path) -> None:
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError, match="no"):
        quantize_version(version_dir, version_dir.with_name("2"), "int8", accept=refuse)
    assert [path.name for path in version_dir.parent.iterdir()] == ["1"]


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    """The table and the row are named: NaN for int8, 1e5 for float16."""
    vectors = np.ones((5000, 64), np.float32)
    vectors[4321, 3], vectors[1234, 5] = np.nan, 1e5
    write_version(tmp_path / "1", np.ones((10, 64), np.float32), vectors)

    with pytest.raises(ModelFormatError, match=r"'table 1', row 4321: .*NaN.*use float32"):
        quantize_version(tmp_path / "1", tmp_path / "2", "int8")
    with pytest.raises(ModelFormatError, match=r"'table 1', row 1234: .*float16 \(65504\)"):
        quantize_version(tmp_path / "1", tmp_path / "2", "float16")
    assert not (tmp_path / "2").exists()


def test_a_version_that_would_not_become_smaller_is_refused(version_dir: Path) -> None:
    """And so is a target that exists."""
    quantize_version(version_dir, version_dir.with_name("2"), "float16")
    with pytest.raises(ConfigurationError, match=r"no table would be smaller as float16; tables: 2 x float16"):
        quantize_version(version_dir.with_name("2"), version_dir.with_name("3"), "float16")
    with pytest.raises(ConfigurationError, match="already exists; choose another --output"):
        quantize_version(version_dir, version_dir.with_name("2"), "int8")


@pytest.mark.parametrize("name", ["emb_vector", "key"])
def test_a_damaged_file_is_named(name: str, version_dir: Path) -> None:
    """Checksums are compared before anything is written."""
    path = version_dir / "tables" / "hashed" / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    with pytest.raises(ModelFormatError, match=f"hashed/{name}: damaged"):
        quantize_version(version_dir, version_dir.with_name("2"), "int8")
    assert not version_dir.with_name("2").exists()


@pytest.mark.parametrize("shape", [(0, 16), (1, 3), (131, 4097)])
def test_tables_of_any_shape_are_quantized(shape: tuple[int, int], tmp_path: Path) -> None:
    """Without rows, and with rows that fill more than a chunk."""
    vectors = np.random.default_rng(0).standard_normal(shape, np.float32)
    spec = write_version(tmp_path / "1", vectors)
    after = quantize_tables(tmp_path / "1", spec, "float16")

    assert after.tables[0] == replace(spec.tables[0], dtype="float16")
    stored = np.fromfile(tmp_path / "1" / "tables" / "t0" / "emb_vector", np.float16).reshape(shape)
    np.testing.assert_array_equal(stored, vectors.astype(np.float16))


def test_links_of_a_rewritten_file_stay_as_they_are(tmp_path: Path) -> None:
    """A table of an import may be a hard link of the trainer's file."""
    vectors = np.ones((10, 64), np.float32)
    spec = write_version(tmp_path / "1", vectors)
    shutil.copytree(tmp_path / "1", tmp_path / "2", copy_function=lambda a, b: Path(b).hardlink_to(a))
    quantize_tables(tmp_path / "2", spec, "int8")

    np.testing.assert_array_equal(np.fromfile(tmp_path / "1" / "tables" / "t0" / "emb_vector", np.float32), 1)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_streamed_updates_go_before_quantized_files(dtype: VectorType, version_dir: Path) -> None:
    """Updated rows are float32, exactly as they came; erased ones get the default vector; others are the files'."""
    target = version_dir.with_name("2")
    after = quantize_version(version_dir, target, dtype).after
    files = [TableFile.open(target / "tables" / table.folder, table) for table in after.tables]
    expected, every = np.empty((50, 4), np.float32), np.arange(50)
    assert files[0].fetch(every, expected).all()
    rows = changing_rows(files)
    rows.writer.update(after.tables[0].folder, np.array([7]), UPDATED)
    rows.writer.erase(after.tables[0].folder, np.array([9]))
    expected[7], expected[9] = UPDATED, 0

    found = np.empty_like(expected)
    look_up_keys(rows.readers[0], 0, every, found)
    np.testing.assert_array_equal(found, expected)
    rows.close()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_stores_hold_what_quantized_files_answer(dtype: VectorType, version_dir: Path, tmp_path: Path) -> None:
    """Pushed rows are float32; updates replace them exactly."""
    target = version_dir.with_name("2")
    quantize_version(version_dir, target, dtype)
    url = f"rocksdb://{tmp_path / 'rows'}"
    push(target, url)
    with (
        InferenceSession.open(target, device="cpu") as files,
        InferenceSession.open(target, device="cpu", persistent_store=url) as stored,
    ):
        expected = files.lookup("user_weight", np.arange(50))
        np.testing.assert_array_equal(stored.lookup("user_weight", np.arange(50)), expected)
        stored.update("user_weight", [7], UPDATED)
        expected[7] = UPDATED
        np.testing.assert_array_equal(stored.lookup("user_weight", np.arange(50)), expected)


# Not ru_maxrss: that also remembers the memory of the process which started this one.
_PEAK = """
import sys
from pathlib import Path
from inference_session.version_directory.quantizing import quantize_version
quantize_version(Path(sys.argv[1]), Path(sys.argv[2]), "int8")
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_tables_are_streamed(tmp_path: Path) -> None:
    """Quantizing a table takes less memory than its 256 MB, all of Python included."""
    num_rows, chunk = 500_000, np.ones((10_000, 128), np.float32)
    write_table(tmp_path / "1" / "tables" / "t", (chunk for _ in range(num_rows // len(chunk))))
    manifest.describe_version(
        ModelSpec((), (), (TableSpec("t", "t", num_rows, 128, keys="row_number"),), ()), tmp_path / "1"
    )

    arguments = [sys.executable, "-c", _PEAK, str(tmp_path / "1"), str(tmp_path / "2")]
    peak = int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)

    assert peak <= 256 << 20, f"{peak / 1e6:.0f} MB"
    assert (tmp_path / "2/tables/t/emb_vector").stat().st_size / (4 * 128 * num_rows) <= 0.28
