"""The version of a directory on the command line: a version directory, or the highest one in a model's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hotrow.output.progress import byte_progress
from inference_session.model_spec import SESSION_FILE
from inference_session.version_directory.session_file import read_spec
from triton_backend.repository.in_place import in_place_backend, read_model_folder
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig
from triton_backend.repository.servable import is_version, versions_in


@dataclass(frozen=True)
class ServedVersion:
    """The version that `hotrow serve` would open."""

    named: Path
    """The directory as the user named it."""
    directory: Path
    """In hotrow's own layout; for HugeCTR's files the import of them."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of a config.pbtxt that is not next to `directory`."""


@contextmanager
def served_version(directory: Path) -> Iterator[ServedVersion]:
    """Yield the version that is meant; HugeCTR's and HPS's files are imported into the cache first, as on a load.

    Raises:
        ModelFormatError: the directory is neither; says what it is.
        as `cached_import`.
    """
    if (directory / SESSION_FILE).exists():
        yield ServedVersion(directory, directory)
        return
    folder, version = _folder_and_version(directory)
    config_file = folder / CONFIG_FILE
    config = ModelConfig.read(config_file) if config_file.exists() else None
    backend = in_place_backend(config.backend) if config else None
    if config is None or backend is None:
        yield ServedVersion(folder / version, folder / version)
        return
    found = read_model_folder(folder, folder.name, config.parameters, backend)
    with byte_progress(f"Importing {folder}") as progress, found.imported(int(version), progress) as imported:
        yield ServedVersion(folder / version, imported, found.session_settings)


def _folder_and_version(directory: Path) -> tuple[Path, str]:
    directory = directory.absolute()
    if is_version(directory.name):
        return directory.parent, directory.name
    versions = versions_in(directory)
    if not versions:
        read_spec(directory)  # its error says what the directory is, and how to name a version
    return directory, str(versions[-1])
