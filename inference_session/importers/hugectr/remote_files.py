"""Files that ps.json names by URL, copied to this machine before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from inference_session.importers.hugectr.ps_fields import PsModel
from inference_session.model_source import is_url
from inference_session.model_source.fetch import fetch
from inference_session.platform.progress import Progress

_FIELDS = ("graph_file", "dense_file", "statistics_file")


def remote_files(model: PsModel) -> Iterator[str]:
    """The URLs among a model's files."""
    names = [*(getattr(model, name) for name in _FIELDS), *model.sparse_files]
    return (name for name in names if name and is_url(name))


def with_local_files(model: PsModel, progress: Progress | None) -> PsModel:
    """The model with copies of its remote files, which are kept in the cache folder.

    Raises:
        as `fetch`.
    """
    if not any(remote_files(model)):
        return model
    local: dict[str, Any] = {name: str(fetch(value, progress)) for name in _FIELDS if (value := getattr(model, name))}
    folders = tuple(str(fetch(folder, progress)) for folder in model.sparse_files)
    return replace(model, sparse_files=folders, **local)
