"""Functions compiled by Numba, whose machine code is kept on disk, or brought along by an image."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba

FOLDER = "NUMBA_CACHE_DIR"
"""Where Numba keeps machine code, which it has to be able to write to even where all is there already."""
SHIPPED_FOLDER = "HOTROW_SHIPPED_KERNELS"
"""What an image brings along, which that folder begins with: it lies in a volume as a rule, which is empty at first."""


def compiled(function: Callable[..., Any], *signatures: str, **options: Any) -> Any:
    """As `numba.njit`, kept on disk where there is a folder for it."""
    _unpack_shipped()
    njit: Any = numba.njit
    try:
        return njit(*signatures, cache=True, **options)(function)
    except RuntimeError:
        # Numba found no folder it may write its cache to (a read-only image without a home): compile per process.
        return njit(*signatures, **options)(function)


@functools.cache
def _unpack_shipped() -> None:
    """Copy all of it, or nothing where the folder is there: another processor's code may be in it under equal names."""
    shipped, folder = os.environ.get(SHIPPED_FOLDER), Path(os.environ.get(FOLDER, ""))
    if not shipped or not folder.name or folder.exists():
        return
    with suppress(OSError):  # no such folder, or none that may be written to: Numba compiles
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent, ignore_cleanup_errors=True) as staging:
            copy = Path(shutil.copytree(shipped, Path(staging) / folder.name))
            copy.rename(folder)  # fails where another process was first
