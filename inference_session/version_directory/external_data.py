"""Finds the other files that an ONNX file takes its tensors from: a network must not read the rest of the machine.

ONNX Runtime's own check depends on its release: the oldest that hotrow runs with opens `../../x`. The file is walked,
not parsed: large weights inside it are stepped over, and the `onnx` package is not needed.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from inference_session.errors import ModelFormatError
from inference_session.platform.small_files import why_unreadable
from inference_session.version_directory.protobuf_wire import BYTES, message_fields

_MAX_DEPTH = 100
"""Protobuf's own limit of messages in each other."""
_TENSOR, _EXTERNAL_DATA = "tensor", 13
_CHILDREN = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
}
"""By message and number of the field, the messages of an ONNX file that lead to tensors (onnx.proto)."""


def external_files(network: Path) -> list[PurePosixPath]:
    """The files that tensors of an ONNX file lie in, relative to its folder.

    Raises:
        ModelFormatError: it cannot be read, is no ONNX file, or names a file outside its folder.
    """
    try:
        with network.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            locations = dict.fromkeys(_locations(data, 0, len(data), "model", 0))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{network}: not readable as an ONNX model: {why_unreadable(error)}") from error
    return [_checked(network, location) for location in locations]


def _locations(data: mmap.mmap, begin: int, end: int, message: str, depth: int) -> Iterator[str]:
    if depth == _MAX_DEPTH:
        raise ValueError(f"byte {begin}: messages are nested more than {_MAX_DEPTH} deep")
    for field in message_fields(data, begin, end):
        if field.kind != BYTES:
            continue
        if message == _TENSOR and field.number == _EXTERNAL_DATA:
            entry = {part.number: data[part.value : part.end] for part in message_fields(data, field.value, field.end)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode()
        elif child := _CHILDREN.get(message, {}).get(field.number):
            yield from _locations(data, field.value, field.end, child, depth + 1)


def _checked(network: Path, location: str) -> PurePosixPath:
    """The path of an external file; symbolic links count as their targets."""
    path, folder = PurePosixPath(location), network.parent.resolve()
    escapes = path.is_absolute() or PureWindowsPath(location).is_absolute() or ".." in path.parts
    # ONNX Runtime takes a location with `*` for an address in its own memory.
    is_odd = not path.parts or any(character in location for character in "\0\\*")
    if escapes or is_odd or not (folder / path).resolve().is_relative_to(folder):
        raise ModelFormatError(f"{network}: it refers to {location!r}, outside its own folder")
    return path
