"""A model file without its large weights: the protobuf is walked, not parsed, and large data stays in the file.

Parsing a model of 1.9 GB the usual way holds it twice. Here the file is mapped, the initializers' `raw_data` are
stepped over, and only what is left is parsed.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto

from inference_session.errors import ModelFormatError
from inference_session.platform.small_files import open_at_once, why_unreadable
from inference_session.version_directory.protobuf_wire import BYTES, Field, message_fields

_MODEL_GRAPH = 7
_HDF5, _GIT_LFS = b"\x89HDF\r\n\x1a\n", b"version https://git-lfs.github.com"
_OTHER_FORMATS = (
    (
        0,
        b"PK\x03\x04",
        (
            "it is a ZIP archive, as torch.save and Keras write; torch.onnx.export and Keras's model.export write "
            "ONNX, and `hotrow import torch` takes what torch.export.save writes"
        ),
    ),
    (0, _HDF5, 'it is an HDF5 file, as Keras writes; model.export("model.onnx", format="onnx") writes ONNX'),
    (0, b"\x80", "it is a pickle; hotrow reads none: have the framework export the model to ONNX"),
    (4, b"ORTM", "it is in ONNX Runtime's own format; import the .onnx file that it was made of"),
    (0, _GIT_LFS, "it is a pointer of Git LFS in place of the file; `git lfs pull` fetches it"),
)
"""What people give instead: where its magic number is in the file, that number, and the way out."""
_GRAPH_INITIALIZER = 5
_TENSOR_RAW_DATA = 9
_MIN_BLOB_BYTES = 4096


@dataclass(frozen=True)
class Blob:
    """Bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


def read_skeleton(path: Path) -> tuple[ModelProto, dict[int, Blob]]:
    """The model without its large `raw_data`, and where those lie, by position among the graph's initializers.

    Raises:
        ModelFormatError: the file cannot be read, or is no ONNX model.
    """
    model = ModelProto()
    blobs: dict[int, Blob] = {}
    try:
        with (
            open(path, "rb", opener=open_at_once) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            model.ParseFromString(_model_bytes(path, data, blobs))
    except (OSError, ValueError, DecodeError) as error:
        raise ModelFormatError(f"{path}: not readable as an ONNX model: {why_unreadable(error)}") from error
    if not model.HasField("graph") or not model.graph.output:
        raise ModelFormatError(f"{path}: not an ONNX model, or one without outputs")
    return model, blobs


def _model_bytes(path: Path, data: mmap.mmap, blobs: dict[int, Blob]) -> bytes:
    for offset, magic, advice in _OTHER_FORMATS:
        if data[offset : offset + len(magic)] == magic:
            raise ValueError(advice)
    parts: list[bytes] = []
    for field in message_fields(data, 0, len(data)):
        if field.number == _MODEL_GRAPH and field.kind == BYTES:
            parts.append(_message(_MODEL_GRAPH, _graph_bytes(path, data, field, blobs)))
        else:
            parts.append(data[field.begin : field.end])
    return b"".join(parts)


def _graph_bytes(path: Path, data: mmap.mmap, graph: Field, blobs: dict[int, Blob]) -> bytes:
    parts: list[bytes] = []
    position = 0
    for field in message_fields(data, graph.value, graph.end):
        if field.number == _GRAPH_INITIALIZER and field.kind == BYTES:
            raw_data, rest = _split_tensor(data, field)
            if raw_data:
                blobs[position] = Blob(path, raw_data.value, raw_data.end - raw_data.value)
            parts.append(_message(_GRAPH_INITIALIZER, rest))
            position += 1
        else:
            parts.append(data[field.begin : field.end])
    return b"".join(parts)


def _split_tensor(data: mmap.mmap, tensor: Field) -> tuple[Field | None, bytes]:
    """The tensor's raw data if they are large, and the bytes of all else."""
    if tensor.end - tensor.value < _MIN_BLOB_BYTES:
        return None, data[tensor.value : tensor.end]
    raw_data = None
    parts: list[bytes] = []
    for field in message_fields(data, tensor.value, tensor.end):
        if field.number == _TENSOR_RAW_DATA and field.kind == BYTES and field.end - field.value >= _MIN_BLOB_BYTES:
            raw_data = field
        else:
            parts.append(data[field.begin : field.end])
    return raw_data, b"".join(parts)


def _message(number: int, content: bytes) -> bytes:
    return _encoded(number << 3 | BYTES) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
