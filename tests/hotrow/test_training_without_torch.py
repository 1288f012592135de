"""hotrow.training where PyTorch is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference_session.errors import ConfigurationError


def test_it_can_be_imported_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import alone needs nothing; the first use of a name raises an error that says what is missing."""
    for name in [name for name in sys.modules if name.startswith("hotrow.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    from hotrow import training

    with pytest.raises(ConfigurationError, match=r"pip install 'hotrow\[torch\]'"):
        training.export  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        training.exprot  # noqa: B018


def test_nothing_else_imports_it() -> None:
    """The commands start without PyTorch, and without looking for it."""
    code = "import sys, hotrow.command_line, inference_session, triton_backend; print('hotrow.training' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("command", [["-m", "hotrow.training.hugectr"], ["-m", "hotrow", "train"]])
def test_scripts_and_configurations_say_what_to_install(tmp_path: Path, command: list[str]) -> None:
    """In one line, before anything else is done with the file."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('absent', name='torch')")
    script = tmp_path / "script.py"
    script.write_text("print('runs')")

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command, script], capture_output=True, text=True, env=environment)  # noqa: PLW1510

    line = "hotrow: training.hugectr needs the package `torch`: pip install 'hotrow[torch]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
