"""The model and version of a directory: its own name is the version's, the name of the folder above is the model's."""

from __future__ import annotations

import os
from pathlib import Path

from inference_session.errors import ConfigurationError


def model_and_version(path: Path) -> tuple[str, str]:
    """The names of the model and of the version of a directory; ConfigurationError where it has no folder above."""
    named = absolute(path)
    if not named.parent.name:
        raise ConfigurationError(f"{named} is not a path of the form <repository>/<model>/<version>")
    return named.parent.name, named.name


def absolute(path: Path) -> Path:
    """The absolute path of a version directory.

    Links on the way keep their names: a repository may link to folders with other names.
    """
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.resolve follows links


def state_file(state_dir: Path, model: str, kind: str) -> Path:
    """The path where processes that serve or publish a model keep state of one kind for each other."""
    return state_dir / f"{model}.{kind}"
