"""Initializers whose values lie in a file: described here, read only when they are written somewhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from inference_session.errors import ModelFormatError
from inference_session.importers.onnx.model_file import Blob

_CHUNK_BYTES = 8 << 20
# By name, because an older onnx lacks the newest; all other types have 8 bits or fewer.
_BITS = {
    **dict.fromkeys(("COMPLEX128",), 128),
    **dict.fromkeys(("INT64", "UINT64", "DOUBLE", "COMPLEX64"), 64),
    **dict.fromkeys(("INT32", "UINT32", "FLOAT"), 32),
    **dict.fromkeys(("INT16", "UINT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("INT2", "UINT2"), 2),
    **dict.fromkeys(("INT8", "UINT8", "BOOL"), 8),
}


@dataclass(frozen=True)
class Weight:
    """One initializer: its description, and its values in one of two places."""

    name: str
    elem_type: int
    dims: tuple[int, ...]
    values: Blob | TensorProto
    """Raw little-endian values in a file, or the tensor itself where it is small or not encoded raw."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the raw values."""
        return tensor_bytes(self.elem_type, self.dims)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the file of a table; see `vector_chunks`."""
        return self.num_bytes * (2 if self.elem_type == TensorProto.BFLOAT16 else 1)

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.dims[1:])

    def chunks(self) -> Iterator[bytes]:
        """The values as raw little-endian bytes, a piece at a time."""
        if isinstance(self.values, TensorProto):
            yield self.values.raw_data or little_endian(_elements(self.values))
            return
        path, left = self.values.path, self.values.num_bytes
        with path.open("rb") as file:
            file.seek(self.values.offset)
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise ModelFormatError(f"{path}: ends {left} bytes before the end of the data of {self.name!r}")
                left -= len(chunk)
                yield chunk

    def vector_chunks(self) -> Iterator[bytes]:
        """The same as the file of a table holds them: bfloat16 becomes float32, which has all of its values."""
        for chunk in self.chunks():
            if self.elem_type == TensorProto.BFLOAT16:
                yield little_endian(np.frombuffer(chunk, "<u2").astype(np.uint32) << np.uint32(16))
            else:
                yield chunk

    def rows(self, keys: NDArray[np.int64]) -> NDArray[Any]:
        """The rows of keys [n]: [n, *dims[1:]], of bfloat16 their bits as uint16; negative keys count from the end."""
        if isinstance(self.values, TensorProto):
            return _elements(self.values)[keys]
        dtype = _dtype(self.elem_type)
        mapped = np.memmap(self.values.path, dtype, "r", self.values.offset, self.dims)
        return np.asarray(mapped[keys])

    def tensor(self) -> TensorProto:
        """The initializer with its values inside."""
        if isinstance(self.values, TensorProto):
            return self.values
        tensor = TensorProto(name=self.name, data_type=self.elem_type, dims=self.dims)
        tensor.raw_data = b"".join(self.chunks())
        return tensor


def _dtype(elem_type: int) -> Any:
    """NumPy's type of the elements. It lacks bfloat16: that of their bits."""
    return np.uint16 if elem_type == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(elem_type)


def _elements(tensor: TensorProto) -> NDArray[Any]:
    if tensor.data_type != TensorProto.BFLOAT16:
        return numpy_helper.to_array(tensor)
    bits = np.frombuffer(tensor.raw_data, "<u2") if tensor.raw_data else np.array(tensor.int32_data, np.uint16)
    return bits.reshape(tuple(tensor.dims))


def little_endian(array: NDArray[Any]) -> bytes:
    """The elements of an array as a file holds them."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def tensor_bytes(elem_type: int, dims: tuple[int, ...]) -> int:
    """Bytes that the raw values take; ValueError for a type without raw values, such as strings."""
    name = TensorProto.DataType.Name(elem_type)
    if name not in _BITS and not name.startswith("FLOAT8"):
        raise ValueError(f"{name} has no raw data")
    return (math.prod(dims) * _BITS.get(name, 8) + 7) // 8


def weight_of(model: Path, tensor: TensorProto, blob: Blob | None) -> Weight:
    """Describe an initializer of a model file; `blob` says where `raw_data` lie that were left in the file.

    Raises:
        ModelFormatError: external data are missing, too short or outside the model's folder; names the file.
    """
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            blob = _external_blob(model, tensor)
        elif blob is None:
            return Weight(tensor.name, tensor.data_type, tuple(tensor.dims), tensor)
        num_bytes = tensor_bytes(tensor.data_type, tuple(tensor.dims))
    except ModelFormatError:
        raise
    except ValueError as error:
        raise ModelFormatError(f"{model}: initializer {tensor.name!r}: {error}") from error
    if num_bytes != blob.num_bytes or min(tensor.dims, default=0) < 0:
        raise ModelFormatError(
            f"{model}: initializer {tensor.name!r} of shape {list(tensor.dims)} needs {num_bytes} bytes, "
            f"{blob.path.name!r} gives it {blob.num_bytes}"
        )
    return Weight(tensor.name, tensor.data_type, tuple(tensor.dims), blob)


def _external_blob(model: Path, tensor: TensorProto) -> Blob:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(model, tensor.name, entries.get("location", ""))
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: not readable, although it holds {tensor.name!r}: {error.strerror}") from error
    offset = int(entries.get("offset", 0))
    num_bytes = int(entries.get("length", tensor_bytes(tensor.data_type, tuple(tensor.dims))))
    if offset < 0 or num_bytes < 0 or offset + num_bytes > file_bytes:
        raise ModelFormatError(
            f"{path}: {file_bytes} bytes, but {tensor.name!r} needs {num_bytes} from byte {offset} on"
        )
    return Blob(path, offset, num_bytes)


def _inside(model: Path, name: str, location: str) -> Path:
    """The external file, which must lie in the model's own folder: a model must not read the rest of the machine."""
    folder = model.resolve().parent
    path = folder / location
    escapes = Path(location).is_absolute() or PureWindowsPath(location).is_absolute() or ".." in Path(location).parts
    if not location or escapes or not path.resolve().is_relative_to(folder):
        raise ModelFormatError(f"{model}: external data of {name!r} is in {location!r}, outside the model's folder")
    return path


def refer_to(tensor: TensorProto, location: str, num_bytes: int) -> None:
    """Let an initializer take its values from a file, starting at the first byte."""
    tensor.CopyFrom(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims))
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(num_bytes))):
        tensor.external_data.add(key=key, value=value)
