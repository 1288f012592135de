"""The contract of a place that holds files: only what a copy needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

Source = TypeVar("Source", bound="ModelSource")


class Entry(NamedTuple):
    """The state of a file or a folder at one moment."""

    path: str
    """Relative to the source's root, `/` between its parts; empty for the root itself."""
    num_bytes: int
    """0 for a folder."""
    stamp: str
    """Differs for two states of a file, so that a change shows even where the size stays."""
    is_folder: bool = False


ChunksFrom = Callable[[int], Iterable[bytes]]
"""Gives what a file is to hold from that byte on; called with the bytes that are there, again where a write is tried
again."""


class ModelSource(ABC):
    """Files below a root. Paths are relative to it; all methods may be called from any thread.

    A permanent failure is an OSError that names the file (SourceError, where the file is not on this machine). A
    failure that may pass is an UnavailableError, which is raised only after some attempts.
    """

    @abstractmethod
    def name_of(self, path: str) -> str:
        """The file's full name, for people."""

    @abstractmethod
    def stat(self, path: str) -> Entry | None:
        """The file or folder at this path; None where nothing exists."""

    @abstractmethod
    def entries(self, path: str = "") -> list[Entry]:
        """All that lies below a folder, at any depth, sorted by path; a file is a list of itself."""

    @abstractmethod
    def read(self, path: str, begin: int, num_bytes: int) -> bytes:
        """Read this many bytes of a file from byte `begin` on; an OSError where it ends earlier."""

    @abstractmethod
    def write(self, path: str, chunks_from: ChunksFrom) -> None:
        """Write a file to its end; it is made if it does not exist. After an error a part may be written: another call
        continues from there.
        """

    @abstractmethod
    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; an existing folder is no error."""

    @abstractmethod
    def rename(self, path: str, target: str) -> None:
        """Move a file or folder to a free path (ConfigurationError if it is taken), atomically and crash-safe."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that it holds; a missing one is no error."""

    def check_space(self, num_bytes: int) -> None:  # noqa: B027
        """Raise UnavailableError where the place is known to have no room for a copy of so many bytes."""

    def hold(self, path: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Keep others who hold a folder out of it until the context ends, where the place can; it is made if needed.

        Raises:
            UnavailableError: another one holds it.
        """
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Close connections. May be called more than once."""

    def __enter__(self: Source) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
