"""Folders that hotrow keeps for a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference_session.platform.user_cache import state_folder

_PROGRAM = """
import os, sys
from pathlib import Path
from inference_session.platform.user_cache import state_folder
assert sys.getfilesystemencoding() == "ascii"
print(state_folder(Path(sys.argv[1])))
"""


def test_every_process_finds_the_state_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Triton's, which can decode ASCII names only."""
    repository = tmp_path / "dépôt модели"
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))
    without_utf8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, repository],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **without_utf8},
    )

    assert done.stdout.strip() == str(state_folder(repository))
