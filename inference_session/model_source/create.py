"""A source by its name: a path, or a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inference_session.errors import ConfigurationError
from inference_session.model_source.base import ModelSource
from inference_session.model_source.local_source import LocalSource

if TYPE_CHECKING:
    from inference_session.model_source.hdfs_url import HdfsUrl


def is_url(place: str | Path) -> bool:
    """Whether a place is named by a URL, rather than by a path of this machine."""
    return "://" in str(place)


def local_folder(place: str | Path) -> Path:
    """The path of a folder of this machine, which need not exist; ConfigurationError for a URL."""
    if is_url(place):  # an error must not repeat it: it may contain a password
        raise ConfigurationError("a URL is no folder of this machine; `hotrow copy` copies to and from HDFS")
    return Path(place)


def create_source(place: str | Path) -> ModelSource:
    """The files at a place: a path, or `hdfs://HOST[:PORT]/path` (docs/how-to/use-hdfs.md).

    Raises:
        ConfigurationError: the URL is malformed or of an unknown kind, or the package that it needs is not installed.
    """
    if not is_url(place):
        return LocalSource(Path(place))
    url = _parsed(str(place))
    from inference_session.model_source.hdfs_source import HdfsSource

    return HdfsSource(url)


def split_place(place: str | Path) -> tuple[str, str]:
    """The folder that holds a place, and the place's name in it."""
    if is_url(place):
        folder, name = _parsed(str(place)).split()
        return str(folder), name
    path = Path(place).absolute()
    if path.name in ("", ".."):
        raise ConfigurationError(f"{str(place)!r} is not a path of a file or folder that can be created")
    return str(path.parent), path.name


def _parsed(url: str) -> HdfsUrl:
    from inference_session.model_source.hdfs_url import HdfsUrl

    return HdfsUrl.parse(url)
