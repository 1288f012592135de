"""Folders that hotrow keeps for a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from inference_session import InferenceSession
from inference_session.platform.user_cache import state_folder
from inference_session.requests.canary import record_canary
from tests.testing import small_model
from tests.testing.onnx_models import model_of
from tests.testing.stored_model import push

_PROGRAM = """
import os, sys
from pathlib import Path
from inference_session.platform.user_cache import state_folder
assert sys.getfilesystemencoding() == "ascii"
print(state_folder(Path(sys.argv[1])))
"""


def _without_utf8(program: str, *arguments: Path | str) -> str:
    """What the program prints where it decodes ASCII names only, as Triton's Python processes do."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, check=True, env=environment)
    return done.stdout.decode(errors="surrogateescape").strip()


def test_every_process_finds_the_state_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Triton's, which can decode ASCII names only."""
    repository = tmp_path / "dépôt модели"
    monkeypatch.setenv("HOTROW_CACHE_DIR", str(tmp_path / "cache"))

    assert _without_utf8(_PROGRAM, repository) == str(state_folder(repository))


_OPENS_A_NETWORK = """
import sys
from pathlib import Path
from inference_session.dense_engine.network_file import NetworkFile
from inference_session.dense_engine.onnx import OnnxEngine
print(OnnxEngine(NetworkFile(Path(sys.argv[1])), num_threads=1).run({}, ["y"])[0])
"""


def test_a_network_in_a_folder_of_any_name_is_opened(tmp_path: Path) -> None:
    """Such as a cache in the home of a user with such a name: ONNX Runtime takes UTF-8 only."""
    path = tmp_path / "josé" / "dense.onnx"
    path.parent.mkdir()
    onnx.save(model_of("g () => (float[1] y) { y = Constant <value = float[1] {2.0}> () }", {}), path)

    assert _without_utf8(_OPENS_A_NETWORK, path) == "[2.]"


_READS_WHAT_SETTINGS_NAME = """
import json, sys
from pathlib import Path
from inference_session import InferenceSession
settings = json.loads(sys.argv[2])
with InferenceSession.open(sys.argv[1], **settings) as session:
    print(session.lookup("code", [7])[0].tolist())
"""


def test_settings_name_folders_of_any_name(tmp_path: Path) -> None:
    """A server reads settings as UTF-8, and its processes open files whose names they decode otherwise."""
    folder, version = tmp_path / "josé", tmp_path / "repository" / "small" / "1"
    folder.mkdir()
    tables = small_model.write(version)
    push(version, f"rocksdb://{folder}/rows")
    with InferenceSession.open(version) as session:
        inputs = small_model.random_inputs(2, np.random.default_rng(0))
        record_canary(session.run, inputs, folder / "canary.npz")
    folders = {name: str(folder / name) for name in ("state_dir", "record_keys")}
    settings = {
        "persistent_store": f"rocksdb://{folder}/rows",
        "canary_requests": str(folder / "canary.npz"),
        **folders,
    }

    assert _without_utf8(_READS_WHAT_SETTINGS_NAME, version, json.dumps(settings)) == str(tables["code"][7].tolist())
    assert (folder / "record_keys").is_dir()
