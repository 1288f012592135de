"""A model repository on HDFS, as a folder of this machine that a server can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from inference_session.errors import ConfigurationError
from inference_session.model_source import create_source, is_url
from inference_session.model_source.fetch import fetch, folder_for_links, link_tree
from inference_session.platform.progress import Progress


@contextmanager
def local_repository(place: str | Path, models: Sequence[str], progress: Progress | None) -> Iterator[Path]:
    """Yield a repository on this machine: a path unchanged; for a URL a copy of its models, or of those wanted.

    Every version is copied once, verified and kept in the cache folder; the yielded folder has links to these copies.
    It is a snapshot of the start: to serve a later version, copy the version there and load it.

    Raises:
        ConfigurationError: the repository has no such model.
        ModelFormatError, OSError, UnavailableError: it cannot be read, or is damaged.
    """
    if not is_url(place):
        yield Path(place)
        return
    url = str(place).rstrip("/")
    parts = _parts(url, models)
    with folder_for_links("repository") as folder:
        for part in parts:
            target = folder / part
            target.parent.mkdir(exist_ok=True)
            link_tree(fetch(f"{url}/{part}", progress), target)
        yield folder


def _parts(url: str, models: Sequence[str]) -> list[str]:
    """The direct content of the models' folders: versions, config.pbtxt …, as `<model>/<name>`."""
    with create_source(url) as source:
        paths = [entry.path for entry in source.entries() if entry.path.count("/") == 1]
    present = sorted({path.partition("/")[0] for path in paths if not path.startswith((".", "_"))})
    for name in models:
        if name not in present:
            raise ConfigurationError(f"{url} has no model {name!r}; models: {', '.join(present) or 'none'}")
    return [path for path in paths if path.partition("/")[0] in (models or present) and "/." not in path]
