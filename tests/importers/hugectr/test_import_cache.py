"""Imports that are kept: made once, found again, made again after any change, and bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, ModelFormatError
from inference_session.importers.hugectr.import_cache import NUM_KEPT, cached_import, default_cache_folder, kept_import
from inference_session.importers.hugectr.ps_json import read_ps_json
from tests.testing.hugectr_source import Source
from tests.testing.programs import PROGRAM_S

OPEN = """
import sys
from pathlib import Path
from inference_session import InferenceSession
from inference_session.importers.hugectr.import_cache import cached_import
from inference_session.importers.hugectr.ps_json import read_ps_json

settings = read_ps_json(Path(sys.argv[1]))
with cached_import(settings, settings.models[0], Path(sys.argv[1]).parent, folder=Path(sys.argv[2])) as version_dir:
    InferenceSession.open(version_dir, verify="full").close()
print(version_dir)
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A small model of HugeCTR."""
    return Source(tmp_path / "source")


def imported(source: Source, cache: Path, **options: Any) -> Path:
    """The version directory that the cache gives."""
    settings = read_ps_json(source.ps_json())
    with cached_import(settings, settings.models[0], source.folder, folder=cache, **options) as version_dir:
        return version_dir


def entries(cache: Path) -> list[Path]:
    """All that the cache keeps of its one model."""
    (imports,) = cache.iterdir()
    return [path for path in imports.iterdir() if path.is_dir()]


def test_an_import_is_found_again(source: Source, tmp_path: Path) -> None:
    """The same sources are imported once, even if ps.json is rewritten, at any path."""
    first = imported(source, tmp_path / "cache")
    written = (first / "session.json").stat().st_mtime_ns

    assert imported(source, tmp_path / "cache") == first
    assert (first / "session.json").stat().st_mtime_ns == written
    assert (first.parent.name, first.name) == ("small", "1")


def change_dense_weights(source: Source) -> None:
    path = source.folder / "dense.model"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\x3f")


def change_a_vector(source: Source) -> None:
    source.vectors[1][0, 0] += 1
    source.write_table(1)


def change_a_default(source: Source) -> None:
    source.model["default_value_for_each_table"] = [0.5, 0.5]


@pytest.mark.parametrize("change", [change_dense_weights, change_a_vector, change_a_default])
def test_any_change_is_imported_anew(source: Source, tmp_path: Path, change: Any) -> None:
    """Weights, rows and their fields of ps.json all count; the earlier import stays unchanged."""
    first = imported(source, tmp_path / "cache")
    with InferenceSession.open(first) as session:
        before = session.predict(source.request())
        change(source)
        second = imported(source, tmp_path / "cache")
        np.testing.assert_array_equal(session.predict(source.request()), before)

    assert second != first
    with InferenceSession.open(second, verify="full") as session:
        assert not np.array_equal(session.predict(source.request()), before)
    with InferenceSession.open(first, verify="full") as session:
        np.testing.assert_array_equal(session.predict(source.request()), before)


def test_files_that_are_written_over_do_not_change_an_import(source: Source, tmp_path: Path) -> None:
    """Tables are copies: a trainer that truncates its files leaves an open session alone."""
    version_dir = imported(source, tmp_path / "cache")
    with InferenceSession.open(version_dir) as session:
        before = session.predict(source.request())
        (source.table_folder(1) / "emb_vector").write_bytes(b"")

        np.testing.assert_array_equal(session.predict(source.request()), before)


def test_a_version_is_found_by_its_number(source: Source, tmp_path: Path) -> None:
    """As it was last opened successfully, even if the sources have changed since."""

    def kept(version: int) -> Path | None:
        with kept_import("small", source.folder, version, folder=tmp_path / "cache") as version_dir:
            return version_dir

    assert kept(1) is None
    first = imported(source, tmp_path / "cache")
    change_a_vector(source)
    second = imported(source, tmp_path / "cache", version=2)
    change_a_vector(source)
    settings = read_ps_json(source.ps_json())
    with (
        pytest.raises(ModelFormatError),
        cached_import(settings, settings.models[0], source.folder, folder=tmp_path / "cache"),
    ):
        raise ModelFormatError("not fit to serve")

    assert [kept(version) for version in (1, 2, 3)] == [first, second, None]


def test_old_imports_are_removed(source: Source, tmp_path: Path) -> None:
    """Those used last are kept; a session that has one open goes on without its files."""
    versions: list[Path] = []

    def import_next() -> Path:
        """By any clock used later than those before it, and earlier than the next one."""
        versions.append(imported(source, tmp_path / "cache"))
        os.utime(versions[-1].parent.parent, (1e9 + len(versions), 1e9 + len(versions)))
        return versions[-1]

    with InferenceSession.open(import_next()) as session:
        before = session.predict(source.request())
        for _ in range(NUM_KEPT + 1):
            change_a_vector(source)
            import_next()

        np.testing.assert_array_equal(session.predict(source.request()), before)
    assert {path.parent.parent for path in versions[-NUM_KEPT:]} == set(entries(tmp_path / "cache"))


def test_processes_that_start_at_once_share_one_import(source: Source, tmp_path: Path) -> None:
    """On a cold cache one imports and the others wait for it."""
    command = [sys.executable, "-c", OPEN, str(source.ps_json()), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    outputs = [process.communicate(timeout=PROGRAM_S)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert len(entries(tmp_path / "cache")) == 1


def test_what_a_killed_import_left_is_taken_over(source: Source, tmp_path: Path) -> None:
    """Half an import does not count."""
    version_dir = imported(source, tmp_path / "cache")
    version_dir.rename(version_dir.with_name(".tmp-1"))
    (version_dir.with_name(".tmp-1") / "session.json").write_bytes(b"{")

    assert imported(source, tmp_path / "cache") == version_dir
    InferenceSession.open(version_dir, verify="full").close()


def test_rows_of_earlier_versions_are_kept_where_they_are_gone(source: Source, tmp_path: Path) -> None:
    """Of several versions the newest one with the key counts; a key that no version has is unknown."""
    older, old = Source(tmp_path / "older"), Source(tmp_path / "old")
    for number, (earlier, keys) in enumerate([(older, [1, 2, 3]), (old, [2, 3])]):
        earlier.keys[1] = np.array(keys)
        earlier.vectors[1] = np.full((len(keys), 4), 10.0 * (number + 1), np.float32)
        earlier.write_table(1)
    source.keys[1], source.vectors[1] = np.array([3, 4]), np.full((2, 4), 30, np.float32)
    source.write_table(1)
    folders = [earlier.table_folder(table) for earlier in (older, old) for table in range(2)]

    with InferenceSession.open(imported(source, tmp_path / "cache", keep_rows_of=folders)) as session:
        assert session.lookup("deep", [1, 2, 3, 4, 5])[:, 0].tolist() == [10, 20, 30, 30, -1]
        assert session.spec.table("deep").num_rows == 4


def test_rows_are_kept_of_whole_versions_only(source: Source, tmp_path: Path) -> None:
    """Two tables in one folder are an error."""
    with pytest.raises(ConfigurationError, match=r"has 2 tables, but 1 folders in keep_rows_of; give one per table"):
        imported(source, tmp_path / "cache", keep_rows_of=[source.table_folder(0)])


def test_a_missing_file_is_named(source: Source, tmp_path: Path) -> None:
    """Nothing is imported from half a model."""
    (source.table_folder(1) / "key").unlink()

    with pytest.raises(ModelFormatError, match=r"1_sparse\.model/key: cannot be read"):
        imported(source, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(source: Source, tmp_path: Path) -> None:
    """The message says how to choose another folder."""
    (tmp_path / "cache").write_bytes(b"")

    with pytest.raises(ConfigurationError, match="HOTROW_CACHE_DIR"):
        imported(source, tmp_path / "cache")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HOTROW_CACHE_DIR, then XDG_CACHE_HOME, then the home folder."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"
    monkeypatch.delenv("HOTROW_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "hotrow/imports"
