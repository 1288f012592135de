"""Publishing a version directory: verified, whole or not at all, and no disk spent on files that exist already."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.errors import ConfigurationError, HotrowError, ModelFormatError, UnavailableError
from inference_session.importers.onnx import import_onnx
from inference_session.model_spec import ModelSpec
from inference_session.platform.progress import Progress
from inference_session.version_directory import manifest
from inference_session.version_directory.publishing import publish_version
from tests.testing import small_model
from tests.testing.onnx_models import model_of, table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A version directory outside any repository."""
    small_model.write(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Where it is published; not there yet."""
    return tmp_path / "repository"


def replace_table(folder: Path, table: str) -> None:
    """Give a table other values, as a training run does, and rewrite the manifest."""
    path = folder / "tables" / table / "emb_vector"
    values = path.read_bytes()
    path.write_bytes(bytes(len(values)))
    manifest.write_manifest(folder)


def same_file(path: Path, other: Path) -> bool:
    """Whether two names lead to one file."""
    return path.stat().st_ino == other.stat().st_ino


def test_a_published_version_is_the_folder(folder: Path, repository: Path) -> None:
    """The published version answers as the folder does, and numbers begin at 1."""
    report = publish_version(folder, repository, "ctr")

    assert report.version_dir == repository / "ctr" / "1"
    manifest.verify(report.version_dir, checksums=True)
    with InferenceSession.open(folder) as before, InferenceSession.open(report.version_dir) as after:
        request = {
            "user": [[1]],
            "codes": [[1, 2]],
            "items": np.zeros((1, 2), np.int32),
            "dense": np.ones((1, 3), np.float32),
        }
        np.testing.assert_array_equal(before.predict(request), after.predict(request))


def test_unchanged_files_are_shared(folder: Path, repository: Path) -> None:
    """A version that changes one table takes the disk of that table; the others are the files of the first version."""
    first = publish_version(folder, repository, "ctr").version_dir
    replace_table(folder, "code")

    report = publish_version(folder, repository, "ctr", version=5)

    tables = report.version_dir / "tables"
    assert same_file(tables / "user_weight" / "emb_vector", first / "tables" / "user_weight" / "emb_vector")
    assert same_file(tables / "hashed" / "key", first / "tables" / "hashed" / "key")
    assert report.copied_bytes == (tables / "code" / "emb_vector").stat().st_size
    assert not same_file(tables / "code" / "emb_vector", folder / "tables" / "code" / "emb_vector")
    manifest.verify(report.version_dir, checksums=True)


def test_a_shared_index_is_not_built_again(folder: Path, repository: Path) -> None:
    """A table whose keys are shared shares their index too."""
    first = publish_version(folder, repository, "ctr").version_dir
    InferenceSession.open(first).close()
    index = Path("tables", "hashed", "index")
    assert (first / index).exists()

    second = publish_version(folder, repository, "ctr").version_dir

    assert same_file(first / index, second / index)


def rot(path: Path) -> None:
    """Change a bit of a file as a failing disk does: size and time of modification stay."""
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[5] ^= 0x40
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("name", ["tables/user_weight/emb_vector", "tables/hashed/key", "dense.onnx", "session.json"])
def test_a_damaged_file_of_an_earlier_version_is_not_shared(
    name: str, folder: Path, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new version gets the bytes of the folder, and the log names the damaged file."""
    first = publish_version(folder, repository, "ctr").version_dir
    rot(first / name)

    report = publish_version(folder, repository, "ctr")

    manifest.verify(report.version_dir, checksums=True)
    assert report.copied_bytes == (folder / name).stat().st_size
    assert f"{first / name}: not shared, because its checksum" in caplog.text


def test_a_file_of_an_earlier_version_that_cannot_be_read_is_not_shared(
    folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing sector of the disk does not prevent publishing good files."""
    first = publish_version(folder, repository, "ctr").version_dir
    unreadable = first / "tables" / "hashed" / "key"
    sha256_of = manifest.sha256_of

    def fail(path: Path, progress: Progress | None = None) -> str:
        if same_file(path, unreadable):
            raise OSError(errno.EIO, "Input/output error")
        return sha256_of(path, progress)

    monkeypatch.setattr(manifest, "sha256_of", fail)
    report = publish_version(folder, repository, "ctr")
    monkeypatch.undo()

    manifest.verify(report.version_dir, checksums=True)
    assert report.copied_bytes == unreadable.stat().st_size
    assert f"{unreadable}: not shared, because it cannot be read" in caplog.text


def test_publishing_again_heals_a_damaged_version(folder: Path, repository: Path) -> None:
    """The how-to's advice for a damaged version helps, also if an older version shares the damaged file."""
    first = publish_version(folder, repository, "ctr").version_dir
    second = publish_version(folder, repository, "ctr").version_dir
    rot(second / "tables" / "user_weight" / "emb_vector")
    shutil.rmtree(second)

    again = publish_version(folder, repository, "ctr").version_dir

    assert again == second
    manifest.verify(again, checksums=True)
    with pytest.raises(ModelFormatError, match="user_weight/emb_vector: damaged"):
        manifest.verify(first, checksums=True)


def test_of_several_earlier_versions_a_good_one_is_shared(folder: Path, repository: Path) -> None:
    """One damaged version does not keep later ones from sharing their files."""
    rot(publish_version(folder, repository, "ctr").version_dir / "tables" / "code" / "emb_vector")
    second = publish_version(folder, repository, "ctr").version_dir

    third = publish_version(folder, repository, "ctr")

    table = Path("tables", "code", "emb_vector")
    assert third.copied_bytes == 0
    assert same_file(second / table, third.version_dir / table)


def test_a_link_in_an_earlier_version_is_not_shared(folder: Path, repository: Path, tmp_path: Path) -> None:
    """Somebody has put a symbolic link in a file's place: the new version does not depend on where it leads."""
    path = publish_version(folder, repository, "ctr").version_dir / "tables" / "code" / "emb_vector"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    report = publish_version(folder, repository, "ctr")

    assert not (report.version_dir / "tables" / "code" / "emb_vector").is_symlink()
    assert report.copied_bytes == (tmp_path / "elsewhere").stat().st_size


@pytest.mark.parametrize("place", ["the earlier version", "the folder"])
def test_a_damaged_index_is_not_taken(place: str, folder: Path, repository: Path) -> None:
    """An index with damaged buckets hides keys: it is better to have none, which is then built."""
    InferenceSession.open(folder).close()
    first = publish_version(folder, repository, "ctr").version_dir
    damaged = first if place == "the earlier version" else folder
    index = damaged / "tables" / "hashed" / "index"
    index.write_bytes(index.read_bytes()[:64] + bytes(len(index.read_bytes()) - 64))
    if place == "the folder":
        shutil.rmtree(first)
    keys = np.fromfile(folder / "tables" / "hashed" / "key", np.int64)

    with InferenceSession.open(publish_version(folder, repository, "ctr").version_dir) as session:
        vectors = session.lookup("hashed", keys)

    expected = np.fromfile(folder / "tables" / "hashed" / "emb_vector", np.float32).reshape(-1, 2)
    np.testing.assert_array_equal(vectors, expected)


def test_without_hard_links_files_are_copied(folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no links costs disk, and nothing else."""

    def refuse(source: object, target: object) -> None:
        raise PermissionError("no links here")

    publish_version(folder, repository, "ctr")
    monkeypatch.setattr(os, "link", refuse)

    report = publish_version(folder, repository, "ctr")

    assert report.shared_bytes == 0
    manifest.verify(report.version_dir, checksums=True)


def test_an_import_shares_tables_with_the_version_before(tmp_path: Path) -> None:
    """Importing a model again whose table is the same takes no second copy of it."""
    graph = "agraph (int64[N, 3] x) => (float[N, 4] y) { g = Gather(W, x) y = ReduceSum <keepdims = 0> (g, axes) }"
    onnx.save(model_of(graph, {"W": table(), "axes": np.array([1])}), tmp_path / "model.onnx")
    versions = [import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "ctr").version_dir for _ in range(2)]

    vectors = [next(version.glob("tables/*/emb_vector")) for version in versions]

    assert same_file(*vectors)
    assert not list(versions[1].glob(".tmp*"))


def test_an_import_does_not_share_a_damaged_table(tmp_path: Path) -> None:
    """A table that was written rightly is not replaced by a damaged one of the version before."""
    graph = "agraph (int64[N, 3] x) => (float[N, 4] y) { g = Gather(W, x) y = ReduceSum <keepdims = 0> (g, axes) }"
    onnx.save(model_of(graph, {"W": table(), "axes": np.array([1])}), tmp_path / "model.onnx")
    first = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "ctr").version_dir
    rot(next(first.glob("tables/*/emb_vector")))

    second = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "ctr").version_dir

    manifest.verify(second, checksums=True)
    np.testing.assert_array_equal(np.fromfile(next(second.glob("tables/*/emb_vector")), np.float32), table().ravel())


def test_an_existing_version_is_refused(folder: Path, repository: Path) -> None:
    """Nothing is overwritten."""
    publish_version(folder, repository, "ctr", version=2)

    with pytest.raises(ConfigurationError, match="2: already exists; choose another version"):
        publish_version(folder, repository, "ctr", version=2)


def truncate(path: Path) -> None:
    """Cut a file short."""
    path.write_bytes(path.read_bytes()[:-10])


def damage(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("tables/code/emb_vector", Path.unlink),
        ("tables/code/emb_vector", truncate),
        ("tables/code/emb_vector", damage),
        ("tables/hashed/key", damage),
        ("dense.onnx", Path.unlink),
        ("dense.onnx", damage),
        ("session.json", Path.unlink),
        ("session.json", truncate),
        ("MANIFEST.json", Path.unlink),
        ("MANIFEST.json", truncate),
    ],
)
def test_a_bad_folder_is_refused_by_name(
    folder: Path, repository: Path, name: str, fault: Callable[[Path], None]
) -> None:
    """A missing or damaged file is named and not published, even if an earlier version has the same file."""
    publish_version(folder, repository, "ctr")
    fault(folder / name)

    with pytest.raises(ModelFormatError, match=str(folder / name)):
        publish_version(folder, repository, "ctr")

    assert sorted(path.name for path in (repository / "ctr").iterdir()) == ["1"]


def test_tables_that_session_json_does_not_describe_are_refused(folder: Path, repository: Path) -> None:
    """Wrong files are refused even if the manifest agrees: sizes follow from rows and embedding_dim."""
    session = folder / "session.json"
    document = json.loads(session.read_text(encoding="utf-8"))
    document["tables"][1]["embedding_dim"] += 1
    session.write_text(json.dumps(document), encoding="utf-8")
    manifest.write_manifest(folder)

    with pytest.raises(ModelFormatError, match=r"code/emb_vector: \d+ bytes, but session.json says 40 rows of 4"):
        publish_version(folder, repository, "ctr")


@pytest.mark.parametrize("content", [b"no network", b"", b"\x08\x08"])
def test_a_network_that_is_none_is_refused(content: bytes, folder: Path, repository: Path) -> None:
    """Nor does a manifest help a dense.onnx that is no ONNX file, or that ONNX Runtime cannot load."""
    (folder / "dense.onnx").write_bytes(content)
    manifest.write_manifest(folder)

    with pytest.raises(ModelFormatError, match=r"dense\.onnx: .*(not readable as an ONNX model|cannot load it)"):
        publish_version(folder, repository, "ctr")
    assert not repository.exists()


def test_a_file_that_the_manifest_leaves_out_is_not_left_behind(folder: Path, repository: Path) -> None:
    """A manifest that does not list a table would publish a version without it."""
    path = folder / "MANIFEST.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["files"]["tables/code/emb_vector"]
    path.write_text(json.dumps(document), encoding="utf-8")

    with pytest.raises(ModelFormatError, match="does not list tables/code/emb_vector"):
        publish_version(folder, repository, "ctr")


def test_a_full_disk_is_told_beforehand(folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes needed and the bytes free are compared before anything is copied."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 100, "free": 10})())

    with pytest.raises(UnavailableError, match=r"needs \d+ bytes, but only 10 are free"):
        publish_version(folder, repository, "ctr")
    assert not repository.exists()


def test_what_a_server_needs_is_part_of_it(folder: Path, repository: Path) -> None:
    """Where config.pbtxt cannot be written, nothing is published."""

    def refuse(version_dir: Path, spec: ModelSpec) -> None:
        raise HotrowError("no configuration")

    with pytest.raises(HotrowError, match="no configuration"):
        publish_version(folder, repository, "ctr", complete=refuse)
    assert not repository.exists()
