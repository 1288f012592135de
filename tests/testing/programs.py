"""Programs that tests run as a user would."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

PROGRAM_S = 500
"""How long a program may take on a slow and busy machine: it does more than one wait. A test may take longer."""


def run_program(*command: str | Path) -> str:
    """The output of a program, which must succeed and print no errors."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def script_module(path: Path) -> ModuleType:
    """A script's module, without its folder on the path, where names such as `triton` would hide packages."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
