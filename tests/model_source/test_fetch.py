"""Copies of remote files in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_session.model_source.fetch import folder_for_links


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold all rows of a model; folders of other work stay."""
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path))
    for name in ("dump-killed", "onnx-killed"):
        (tmp_path / "sources" / name / "user").mkdir(parents=True)

    with folder_for_links("dump") as folder:
        assert {path.name for path in (tmp_path / "sources").iterdir()} == {folder.name, "onnx-killed"}
