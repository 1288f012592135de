"""The backend directory that `hotrow serve` lays out."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hotrow.output.formatting import in_words
from triton_backend.launcher.installation import STUB, Installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    """One whose Python backend has a large file."""
    python = tmp_path / "backends" / "python"
    (python / "__pycache__").mkdir(parents=True)
    (python / STUB).write_text("a stub of another Python")
    (python / "libtriton_python.so").write_bytes(bytes(300_000))
    (tmp_path / "stub").write_text("a stub")
    (tmp_path / "new").mkdir()
    return Installation(tmp_path / "tritonserver", tmp_path / "backends", tmp_path / "stub", ())


def test_backends_are_copied(installation: Installation, tmp_path: Path) -> None:
    """Compiled Python is not; the stub is that of this Python."""
    backends = installation.prepare(tmp_path / "new")

    copied = {path.name for path in (backends / "python").iterdir() if not path.is_symlink()}
    assert copied == {"libtriton_python.so", STUB}
    assert (backends / "python" / STUB).read_text() == "a stub"
    assert (backends / "hotrow" / "model.py").is_file()
    assert not list(backends.rglob("__pycache__"))


def test_a_full_disk_is_told_in_one_line(installation: Installation, tmp_path: Path) -> None:
    """It names the file that could not be written, and which one it is a copy of."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            installation.prepare(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    library = Path("backends", "python", "libtriton_python.so")
    assert in_words(raised.value) == f"{tmp_path / library} -> {tmp_path / 'new' / library}: File too large"
