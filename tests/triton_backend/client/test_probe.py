"""The key that marks a probe."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from triton_backend.client.probe import SERVE_FOLDER_PREFIX, find_key, write_key


def test_only_a_folder_of_the_same_user_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may make such a folder among the temporary ones, and put a file there that never ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{SERVE_FOLDER_PREFIX}1"
    folder.mkdir()
    write_key(folder, 8001, "key")
    assert find_key("127.0.0.1:8001") == "key"

    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert find_key("127.0.0.1:8001") is None
