"""A version directory that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference_session.errors import ConfigurationError


@contextmanager
def staged(repository: Path, name: str, version: int | None) -> Iterator[tuple[Path, Path]]:
    """A folder to fill; it becomes the version if all goes well, and is gone otherwise."""
    if not name or name.startswith(".") or Path(name).name != name:
        raise ConfigurationError(f"model name {name!r} must be a plain folder name that does not begin with '.'")
    model_dir = repository / name
    version = _version(model_dir, version)
    made = [folder for folder in (model_dir, repository) if not folder.exists()]
    staging, version_dir = model_dir / f".tmp-{version}", model_dir / str(version)
    try:
        if staging.exists():
            shutil.rmtree(staging)  # what an import that was killed left behind
        staging.mkdir(parents=True)
        yield staging, version_dir
        _sync(staging)
        staging.rename(version_dir)
        _sync_folder(model_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:
            _remove_if_empty(folder)
        raise


def _version(model_dir: Path, version: int | None) -> int:
    existing = [int(p.name) for p in model_dir.iterdir() if p.name.isdecimal()] if model_dir.is_dir() else []
    if version is None:
        return max(existing, default=0) + 1
    if version < 1:
        raise ConfigurationError(f"version must be at least 1, found {version}")
    if version in existing:
        raise ConfigurationError(f"{model_dir / str(version)} exists; choose another version, or none for the next")
    return version


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _sync(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
