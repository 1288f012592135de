"""MANIFEST.json finds what is missing, cut or changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inference_session.errors import ModelFormatError
from inference_session.version_directory import manifest


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A small version directory with its manifest."""
    (tmp_path / "tables" / "user").mkdir(parents=True)
    (tmp_path / "tables" / "user" / "emb_vector").write_bytes(b"vectors")
    (tmp_path / "tables" / "user" / "index").write_bytes(b"rebuilt at will")
    (tmp_path / "session.json").write_bytes(b"session")
    manifest.write_manifest(tmp_path)
    return tmp_path


def test_a_whole_version_passes(version: Path) -> None:
    """What was written is accepted, by sizes and by checksums."""
    manifest.verify(version, checksums=False)
    manifest.verify(version, checksums=True)


def test_indexes_are_not_listed(version: Path) -> None:
    """An index may be rebuilt without making the version look damaged."""
    listed = {str(entry.path) for entry in manifest.read_manifest(version)}

    assert listed == {"session.json", "tables/user/emb_vector"}


def test_every_flipped_byte_is_found(version: Path) -> None:
    """One changed byte of any listed file is named by the full check."""
    for name in ("session.json", "tables/user/emb_vector"):
        path = version / name
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(ModelFormatError, match=path.name):
                manifest.verify(version, checksums=True)
        path.write_bytes(whole)


@pytest.mark.parametrize("content", [b"sessio", b"session!", b""])
def test_a_wrong_size_is_found_without_reading(version: Path, content: bytes) -> None:
    """A truncated or grown file is refused with both sizes."""
    (version / "session.json").write_bytes(content)

    with pytest.raises(ModelFormatError, match=rf"session\.json.*{len(content)} bytes.*says 7"):
        manifest.verify(version, checksums=False)


def test_a_missing_file_is_named(version: Path) -> None:
    """A file that is gone is named."""
    (version / "session.json").unlink()

    with pytest.raises(ModelFormatError, match=r"session\.json.*no such file"):
        manifest.verify(version, checksums=False)


def test_tables_may_be_absent_as_a_whole_where_allowed(version: Path) -> None:
    """Where a store holds the rows, the folder of tables may be gone, but not half of it."""
    (version / "tables" / "user" / "emb_vector").unlink()
    with pytest.raises(ModelFormatError, match="emb_vector"):
        manifest.verify(version, checksums=False, absent=frozenset({"tables"}))

    (version / "tables" / "user" / "index").unlink()
    (version / "tables" / "user").rmdir()
    (version / "tables").rmdir()
    manifest.verify(version, checksums=True, absent=frozenset({"tables"}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "files": {}}',
        '{"format": 1}',
        '{"format": 1, "files": {}}',
        '{"format": 1, "files": {"../x": {"bytes": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"/x": {"bytes": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"x": {"bytes": "many", "sha256": ""}}}',
        '{"format": 1, "files": {"x": 3}}',
        "[" * 100_000,
    ],
)
def test_a_foreign_manifest_is_refused(version: Path, text: str) -> None:
    """Any other content is refused with the file's name."""
    (version / manifest.MANIFEST_FILE).write_text(text)

    with pytest.raises(ModelFormatError, match="MANIFEST"):
        manifest.verify(version, checksums=False)


@pytest.mark.parametrize("name", ["session.json", "tables/user/emb_vector"])
def test_a_manifest_that_leaves_out_a_file_is_refused(name: str, version: Path) -> None:
    """Damage of a file that is read but not listed would go unnoticed."""
    path = version / manifest.MANIFEST_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["files"][name]
    path.write_text(json.dumps(document), encoding="utf-8")

    with pytest.raises(ModelFormatError, match=f"MANIFEST.json: does not list {name}"):
        manifest.verify(version, checksums=False)


@pytest.mark.parametrize("linked", ["session.json", "tables/user/emb_vector", "tables/user", "tables"])
def test_a_link_out_of_the_version_is_refused(
    linked: str, version: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A version is copied, shared or removed with all its files; links within it are harmless."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    (version / linked).rename(elsewhere)
    (version / linked).symlink_to(elsewhere)
    with pytest.raises(ModelFormatError, match="a link to a file outside its version"):
        manifest.verify(version, checksums=False)

    (version / linked).unlink()
    elsewhere.rename(version / "inside")
    (version / linked).symlink_to(version / "inside")
    manifest.verify(version, checksums=True)


def test_a_linked_version_directory_is_no_harm(version: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The directory itself may be reached by a link."""
    link = tmp_path_factory.mktemp("repository") / "1"
    link.symlink_to(version)

    manifest.verify(link, checksums=True)


def test_a_pipe_in_a_file_s_place_is_refused(version: Path) -> None:
    """Reading it would wait for a writer."""
    (version / "tables" / "user" / "emb_vector").unlink()
    os.mkfifo(version / "tables" / "user" / "emb_vector")

    with pytest.raises(ModelFormatError, match="not a regular file"):
        manifest.verify(version, checksums=True)


def test_a_version_without_a_manifest_is_refused(tmp_path: Path) -> None:
    """A half-written version has no manifest yet."""
    with pytest.raises(ModelFormatError, match=r"MANIFEST\.json: no such file"):
        manifest.verify(tmp_path, checksums=False)
