"""An ONNX model on HDFS, with its external data, as files in one folder of this machine."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from google.protobuf.message import Message
from onnx import TensorProto

from inference_session.errors import ModelFormatError
from inference_session.importers.onnx.model_file import read_skeleton
from inference_session.model_source import is_url
from inference_session.model_source.create import split_place
from inference_session.model_source.fetch import fetch, folder_for_links, forget, link_tree
from inference_session.platform.progress import Progress


@contextmanager
def local_model(place: str | Path, progress: Progress | None) -> Iterator[Path]:
    """Yield a model file of this machine: a path unchanged, for a URL a copy, which is removed after success.

    Raises:
        ModelFormatError: the model names external data outside of its own folder.
        OSError, UnavailableError: it cannot be read.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder, name = split_place(place)
    with folder_for_links("onnx") as together:
        model = together / name
        link_tree(fetch(place, progress), model)
        urls = [f"{folder.rstrip('/')}/{location}" for location in _external_files(model, str(place))]
        for url in urls:
            target = together / url.removeprefix(f"{folder.rstrip('/')}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            link_tree(fetch(url, progress), target)
        yield model
    for url in (str(place), *urls):
        forget(url)


def _external_files(path: Path, name: str) -> list[str]:
    """Where the model's external data lie, relative to its folder; each file once."""
    model, _ = read_skeleton(path)
    locations = sorted({location for tensor in _tensors(model) if (location := _location(tensor))})
    for location in locations:
        if posixpath.isabs(location) or ".." in location.split("/"):
            raise ModelFormatError(f"{name}: external data is in {location!r}, outside the model's folder")
    return locations


def _location(tensor: TensorProto) -> str:
    if tensor.data_location != TensorProto.EXTERNAL:
        return ""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _tensors(message: Message) -> Iterable[TensorProto]:
    """All tensors of a model, those of subgraphs and attributes too."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in value if isinstance(value, Iterable) else (value,):
                yield from _tensors(part)
