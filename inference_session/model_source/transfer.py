"""One file from a source to another: read ahead in parallel, written in order, read back and compared."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Event

from inference_session.errors import ModelFormatError, SourceError, UnavailableError
from inference_session.model_source.base import Entry, ModelSource
from inference_session.platform.progress import Progress
from inference_session.version_directory.manifest import MANIFEST_FILE

CHUNK_BYTES = 16 << 20
NUM_CHUNKS = 4
"""Chunks of one file that are read ahead."""


def read_ahead(
    source: ModelSource, entry: Entry, readers: Executor, *, begin: int = 0, num_chunks: int = NUM_CHUNKS
) -> Iterator[bytes]:
    """A file's bytes from `begin` on, in chunks, of which this many are requested at a time."""
    pending: deque[Future[bytes]] = deque()
    try:
        for offset in range(begin, entry.num_bytes, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, entry.num_bytes - offset)
            pending.append(readers.submit(source.read, entry.path, offset, num_bytes))
            if len(pending) >= num_chunks:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


@dataclass
class FileTransfer:
    """The copy of one file: of `entry` of `origin` to the path `target` of `place`."""

    origin: ModelSource
    entry: Entry
    place: ModelSource
    target: str
    num_in_draft: int | None
    """Bytes that an earlier run has written there; None: the file does not exist."""
    sha256: str | None
    """From a manifest."""
    readers: Executor
    progress: Progress
    stopped: Event
    """Ends the transfer before its next chunk."""
    _num_reported: int = 0
    _sent: hashlib._Hash = field(default_factory=hashlib.sha256)
    _num_hashed: int = 0

    def run(self) -> None:
        """Copy what is missing and compare all of it.

        Raises:
            ModelFormatError: the file is not what the manifest says.
            OSError, UnavailableError: as of ModelSource.
        """
        if self.num_in_draft == self.entry.num_bytes:
            self._report(self.entry.num_bytes)
            if self.sha256 in (None, self._stored_sha256()):
                return
            self.place.remove(self.target)
        stored = self._write()
        if self.sha256 not in (None, stored) and self.num_in_draft:
            # The bytes of an earlier run were damaged since: copy again, from the start.
            self.num_in_draft = 0
            self.place.remove(self.target)
            stored = self._write()
        self._compare(stored)

    def _write(self) -> str:
        """Write what is missing; returns the SHA-256 of the whole file then."""
        self.place.write(self.target, self._chunks_from)
        return self._stored_sha256()

    def _compare(self, stored: str) -> None:
        sent = self._sent.hexdigest()
        if stored == sent and self.sha256 in (None, sent):
            return
        self.place.remove(self.target)
        if self.sha256 not in (None, sent):
            name = self.origin.name_of(self.entry.path)
            raise ModelFormatError(f"{name}: damaged, its checksum is not the one in {MANIFEST_FILE}")
        raise SourceError(
            f"{self.place.name_of(self.target)}: the file there differs from what was written; copy it again"
        )

    def _chunks_from(self, begin: int) -> Iterator[bytes]:
        self._report(begin)
        if begin != self._num_hashed:
            self._sent = self._hash_stored(begin)
            self._num_hashed = begin
        for chunk in read_ahead(self.origin, self.entry, self.readers, begin=begin):
            if self.stopped.is_set():
                raise UnavailableError(
                    f"{self.origin.name_of(self.entry.path)}: not copied, because other files failed"
                )
            self._sent.update(chunk)
            self._num_hashed += len(chunk)
            yield chunk
            self._report(self._num_hashed)

    def _report(self, num_bytes: int) -> None:
        self.progress(num_bytes - self._num_reported)
        self._num_reported = num_bytes

    def _stored_sha256(self) -> str:
        """The SHA-256 of the file at the target."""
        stored = self.place.stat(self.target)
        if stored is None or stored.num_bytes != self.entry.num_bytes:
            return "of another size"
        return self._hash_stored(stored.num_bytes).hexdigest()

    def _hash_stored(self, num_bytes: int) -> hashlib._Hash:
        digest = hashlib.sha256()
        if num_bytes:
            for chunk in read_ahead(self.place, Entry(self.target, num_bytes, ""), self.readers):
                digest.update(chunk)
        return digest
