"""A file or a folder from one source to another: parallel, resumable, verified, and at its target whole or not at all.

Chunks are read ahead in parallel and written in their order, so the size of a file says how far its copy has come: a
second run continues at that byte, unless the source has changed since. Every byte is read back from the target, and
the SHA-256 is compared with what was sent and with the MANIFEST.json that lists the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from inference_session.errors import ConfigurationError, ModelFormatError, SourceError, UnavailableError
from inference_session.model_source.base import Entry
from inference_session.model_source.create import create_source, split_place
from inference_session.model_source.draft_copy import DraftCopy
from inference_session.model_source.inventory import Inventory
from inference_session.model_source.transfer import NUM_CHUNKS, FileTransfer, read_ahead
from inference_session.platform.daemon_threads import DaemonThreads
from inference_session.platform.progress import Progress

NUM_FILES = 4
"""Files under way at a time; with NUM_CHUNKS of CHUNK_BYTES for each, what bounds the memory."""
MAX_ROUNDS = 3
"""How often the source is looked at again where it has changed meanwhile."""


@dataclass(frozen=True)
class CopyReport:
    """The result of a copy."""

    num_files: int
    num_bytes: int
    num_resumed_bytes: int
    """Bytes among these that an earlier run had written."""


class Copy:
    """One copy. A context manager, which holds connections."""

    def __init__(self, source: str | Path, target: str | Path) -> None:
        """Read the state of source and target; nothing is written yet.

        Raises:
            ConfigurationError: the target exists with other files, or lies in the source; a URL is malformed.
            ModelFormatError: the source does not match its manifest.
            OSError, UnavailableError: the source cannot be read.
        """
        folder, self._name = split_place(target)
        self._target = target
        self._origin = create_source(source)
        self._place = create_source(folder)
        self._draft = DraftCopy(self._place, self._name)
        try:
            self._inventory = Inventory.of(self._origin)
            self._is_there = self._refuse_bad_target()
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self._inventory.num_bytes

    def run(self, progress: Progress | None = None) -> CopyReport:
        """Copy what an earlier run has not copied, and put it in place. An existing target is compared instead.

        Raises:
            ConfigurationError: the existing target has other contents.
            ModelFormatError: a file is not what the manifest says; names it.
            OSError: the source cannot be read, or the target not written.
            UnavailableError: the target's disk has too little space, one of them does not answer, another process
                copies to the target, or the source changes all the time. Run it again.
        """
        if not self._is_there:
            with self._draft.hold():
                if not self._refuse_bad_target():  # else another process has completed the copy meanwhile
                    return self._copy(progress or _ignore)
        self._compare(progress or _ignore)
        self._draft.tidy_up()
        return CopyReport(len(self._inventory.files), self.num_bytes, self.num_bytes)

    def _copy(self, progress: Progress) -> CopyReport:
        """See `run`."""
        num_resumed = 0
        for _ in range(MAX_ROUNDS):
            kept = self._draft.prepare(self._origin.name_of(""), self._inventory)
            num_resumed = num_resumed or sum(kept.values())
            self._place.check_space(self.num_bytes - sum(kept.values()))
            failure = self._transfer(kept, progress)
            if self._is_unchanged():
                if failure is not None:
                    raise failure
                self._draft.move_into_place()
                return CopyReport(len(self._inventory.files), self.num_bytes, num_resumed)
        raise UnavailableError(f"{self._origin.name_of('')}: its files changed while they were copied")

    def close(self) -> None:
        """Close connections."""
        self._origin.close()
        self._place.close()

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_bad_target(self) -> bool:
        """Returns whether the target exists with files of these sizes, as after a run that was killed at its end."""
        target = self._place.name_of(self._name)
        if self._place.stat(self._name) is not None:
            with create_source(self._target) as there:
                if _files(there.entries()) == _files(self._inventory.entries):
                    return True
            raise self._exists_already()
        if target.startswith(f"{self._origin.name_of('').rstrip('/')}/"):
            raise ConfigurationError(
                f"{target}: is inside {self._origin.name_of('')}, the folder to be copied; choose another target"
            )
        return False

    def _compare(self, progress: Progress) -> None:
        """Raise ConfigurationError unless every byte at the target is that of the source."""
        with create_source(self._target) as there, DaemonThreads(2 * NUM_CHUNKS) as readers:
            for entry in self._inventory.files:
                chunks = zip(read_ahead(self._origin, entry, readers), read_ahead(there, entry, readers), strict=True)
                for ours, theirs in chunks:
                    if ours != theirs:
                        raise self._exists_already()
                    progress(len(ours))

    def _exists_already(self) -> ConfigurationError:
        target = self._place.name_of(self._name)
        return ConfigurationError(f"{target}: already exists with other contents; choose another target")

    def _transfer(self, kept: dict[str, int], progress: Progress) -> OSError | ModelFormatError | None:
        """Copy all files, some at a time. Returns the error if a change of the source may have caused it."""
        stopped = Event()
        with DaemonThreads(NUM_FILES * NUM_CHUNKS) as readers, DaemonThreads(NUM_FILES) as writers:
            transfers = [
                FileTransfer(
                    self._origin,
                    entry,
                    self._place,
                    self._draft.path_of(entry.path),
                    num_in_draft=kept.get(entry.path),
                    sha256=self._inventory.checksums.get(entry.path),
                    readers=readers,
                    progress=progress,
                    stopped=stopped,
                )
                for entry in self._inventory.files
            ]
            futures = [writers.submit(transfer.run) for transfer in transfers]
            try:
                for future in as_completed(futures):
                    future.result()
            except (SourceError, ModelFormatError, FileNotFoundError) as error:
                return error
            finally:
                stopped.set()
                writers.shutdown(wait=False, cancel_futures=True)
        return None

    def _is_unchanged(self) -> bool:
        """Whether the source is unchanged since its state was read; reads it again."""
        before = self._inventory
        if before.entries == tuple(self._origin.entries()):
            return True
        self._inventory = Inventory.of(self._origin)
        return False


def _files(entries: Sequence[Entry]) -> list[tuple[str, int, bool]]:
    """Paths and sizes."""
    return [(entry.path, entry.num_bytes, entry.is_folder) for entry in entries]


def _ignore(num_bytes: int) -> None:
    """Does nothing: no caller wants to know."""
