"""The folders of readers, which several processes make and remove at the same time."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from inference_session.parameter_server.rocksdb.reader_folder import ReaderFolder


def test_a_folder_that_another_reader_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes it for an abandoned one between its making and its locking."""
    removed: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_remove(*, prefix: str) -> str:
        path = make(prefix=prefix)
        if not removed:
            removed.append(Path(path))
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", make_and_remove)
    with ReaderFolder() as folder:
        assert list(tmp_path.iterdir()) == [folder.path]
        assert folder.path not in removed
    assert list(tmp_path.iterdir()) == []
