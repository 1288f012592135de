"""Folders that hotrow keeps for a user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from inference_session.platform.user_cache import state_folder
from tests.testing.onnx_models import model_of

_PROGRAM = """
import os, sys
from pathlib import Path
from inference_session.platform.user_cache import state_folder
assert sys.getfilesystemencoding() == "ascii"
print(state_folder(Path(sys.argv[1])))
"""


def _without_utf8(program: str, path: Path) -> str:
    """What the program prints where it decodes ASCII names only, as Triton's Python processes do."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=True, env=environment)
    return done.stdout.decode(errors="surrogateescape").strip()


def test_every_process_finds_the_state_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Triton's, which can decode ASCII names only."""
    repository = tmp_path / "dépôt модели"
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))

    assert _without_utf8(_PROGRAM, repository) == str(state_folder(repository))


_OPENS_A_NETWORK = """
import sys
from pathlib import Path
from inference_session.dense_engine.onnx import OnnxEngine
print(OnnxEngine(Path(sys.argv[1]), num_threads=1).run({}, ["y"])[0])
"""


def test_a_network_in_a_folder_of_any_name_is_opened(tmp_path: Path) -> None:
    """Such as a cache in the home of a user with such a name: ONNX Runtime takes UTF-8 only."""
    path = tmp_path / "josé" / "dense.onnx"
    path.parent.mkdir()
    onnx.save(model_of("g () => (float[1] y) { y = Constant <value = float[1] {2.0}> () }", {}), path)

    assert _without_utf8(_OPENS_A_NETWORK, path) == "[2.]"
