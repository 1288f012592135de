"""Reads torch's distributed checkpoints from any place that hotrow knows, in pieces and without unpickling."""

from __future__ import annotations

import io
import pickle
import posixpath
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from inference_session.errors import ModelFormatError
from inference_session.model_source.base import ModelSource

METADATA_FILE = ".metadata"
_BUFFER_BYTES = 8 << 20
_ALLOWED = {
    ("builtins", "getattr"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}
"""The classes in a checkpoint's metadata, except types of elements."""


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint in a `ModelSource`. Its metadata may name torch's own records only, nothing that runs."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__("/")
        self.fs = _Files(source)
        self._source = source

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """The metadata of the checkpoint.

        Raises:
            ModelFormatError: the file is damaged, or no metadata of a checkpoint.
        """
        place = self._source.name_of(METADATA_FILE)
        with self.fs.create_stream(METADATA_FILE, "rb") as file:
            content = file.read()
        try:
            metadata = _Records(io.BytesIO(content)).load()
        except Exception as error:  # a damaged record may fail in any way
            raise ModelFormatError(f"{place}: not the metadata of a checkpoint: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise ModelFormatError(f"{place}: not the metadata of a checkpoint, but a {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """The part of a file that holds one tensor, whose checksums, which torch writes but does not read, are right.

        Raises:
            ModelFormatError: the file is damaged.
        """
        # Not torch's own view of a part of a file: it cannot seek from the end.
        part = io.BufferedReader(_File(self._source, sinfo.relative_path, sinfo.offset, sinfo.length), _BUFFER_BYTES)
        try:
            _check(part)
        except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError) as error:
            raise ModelFormatError(f"{self._source.name_of(sinfo.relative_path)}: damaged: {error}") from error
        part.seek(0)
        return part


def _check(archive: Any) -> None:
    """Read all members of a ZIP file, which compares their checksums."""
    with zipfile.ZipFile(archive) as members:
        for name in members.namelist():
            with members.open(name) as member:
                while member.read(_BUFFER_BYTES):
                    pass


class _Records(pickle.Unpickler):
    """Makes the records of a checkpoint, and refuses anything else by its name."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that may be made."""
        import torch

        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        if (module, name) == ("builtins", "getattr"):
            return _member_of_encoding
        return super().find_class(module, name)


def _member_of_encoding(kind: Any, name: str) -> Any:
    """How older Pythons write a member of an enumeration."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


class _Files(FileSystemBase):
    """The part of a file system that the reader uses."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """A file to read from."""
        if mode != "rb":
            raise ValueError(f"checkpoints can only be read, not opened with mode {mode!r}")
        raw = _File(self._source, str(path).lstrip("/"))
        with io.BufferedReader(raw, _BUFFER_BYTES) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        """A path below another."""
        return posixpath.join(str(path), suffix)

    def init_path(self, path: Any) -> str:
        """The path, unchanged."""
        return str(path)

    def exists(self, path: Any) -> bool:
        """Whether a file exists."""
        return self._source.stat(str(path).lstrip("/")) is not None

    def rename(self, path: Any, new_path: Any) -> None:
        """Refused: a checkpoint that is read does not change."""
        raise io.UnsupportedOperation(f"{path} is opened to be read: it cannot be renamed to {new_path}")

    def mkdir(self, path: Any) -> None:
        """Refused, as `rename` is."""
        raise io.UnsupportedOperation(f"{path} is opened to be read: no folder can be made there")

    def rm_file(self, path: Any) -> None:
        """Refused, as `rename` is."""
        raise io.UnsupportedOperation(f"{path} is opened to be read: it cannot be removed")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is one."""
        return True


class _File(io.RawIOBase):
    """A file of a source, or a part of it, read where it is asked for."""

    def __init__(self, source: ModelSource, path: str, begin: int = 0, num_bytes: int | None = None) -> None:
        super().__init__()
        entry = source.stat(path)
        if entry is None:
            raise ModelFormatError(f"{source.name_of(path)}: no such file; the checkpoint is incomplete")
        self._size = entry.num_bytes - begin if num_bytes is None else num_bytes
        if begin + self._size > entry.num_bytes:
            raise ModelFormatError(
                f"{source.name_of(path)}: damaged: {entry.num_bytes} bytes, at least {begin + self._size} expected"
            )
        self._source, self._path, self._begin, self._at = source, path, begin, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position from which the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read on."""
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._source.read(self._path, self._begin + self._at, count)
        self._at += count
        return count
