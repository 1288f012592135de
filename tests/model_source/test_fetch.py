"""Copies of remote files in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.model_source import fetch
from inference_session.model_source.fetch import folder_for_links


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold all rows of a model. Folders of other work stay, and those of other machines, whose locks cannot be
    seen where they share the file system.
    """
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path))
    with folder_for_links("dump") as ours, folder_for_links("onnx") as onnx:
        sources = ours.parent
    monkeypatch.setattr(fetch, "boot_id", lambda: "another machine")
    with folder_for_links("dump") as theirs:
        pass
    monkeypatch.undo()
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path))
    for left in (ours, onnx, theirs):
        (left / "user").mkdir(parents=True)

    with folder_for_links("dump") as folder:
        assert {*sources.iterdir()} == {folder, onnx, theirs}
