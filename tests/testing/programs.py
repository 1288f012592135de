"""Programs that tests run as a user would."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
