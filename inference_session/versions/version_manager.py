"""VersionManager: decides which content of a version directory answers, and replaces it.

    load       the directory's new content is opened next to the content that serves, verified and warmed
    activate   from one moment on leases are on the new content
    drain      requests that began on the old one end on it
    close      the old one frees its resources

After any failure before `activate` the old content continues to serve.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference_session.errors import ConfigurationError, SessionClosedError, UnavailableError
from inference_session.model_spec import TABLES_FOLDER, ModelSpec
from inference_session.session import InferenceSession, SessionSnapshot, closed_on_error
from inference_session.stats import added
from inference_session.version_directory import manifest
from inference_session.version_directory.manifest import FileEntry
from inference_session.version_directory.verified_files import FileState, file_state
from inference_session.versions.model_version import ModelVersion

MAX_RETRY_S = 60.0
"""The longest time between two attempts at content that could not be loaded."""

_CONTENT = frozenset({"source", "ranking"})
"""Fields of ModelSpec in which two contents of one version may differ. Which inputs are the context is among inputs."""
_TABLE_CONTENT = frozenset({"num_rows", "dtype", "default_vector"})
"""Fields of TableSpec in which they may."""

_log = logging.getLogger(__name__)


class VersionManager:
    """Gives leases on the content that serves, and replaces it when the directory's manifest changes.

    With `watch_interval_s` in the session's settings MANIFEST.json is looked at that often. All methods may be called
    from any thread.
    """

    def __init__(self, directory: Path, open_session: Callable[[], InferenceSession]) -> None:
        """Open what the directory holds now.

        Args:
            directory: the version directory, looked at again by its name.
            open_session: opens it; called again for each new content.

        Raises:
            the errors of `open_session`; UnavailableError where the directory was written to meanwhile.
        """
        self._directory = directory
        self._open_session = open_session
        self._lock = threading.Lock()
        self._replacing = threading.Lock()
        self._past: SessionSnapshot | None = None
        """Counters of contents that have been closed."""
        self._draining: ModelVersion | None = None
        self._num_updates = 0
        self._num_failed_updates = 0
        self._active = self._load()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        if interval_s := self._active.session.config.watch_interval_s:
            self._watcher = threading.Thread(target=self._watch, args=(interval_s,), name="hotrow-watch", daemon=True)
            self._watcher.start()

    @property
    def spec(self) -> ModelSpec:
        """The description of the model; every content has the same in all that a client sees."""
        return self._active.session.spec

    @property
    def num_devices(self) -> int:
        """See InferenceSession."""
        return self._active.session.num_devices

    @property
    def failure(self) -> str | None:
        """Why the content that serves can no longer answer; None: it can."""
        return self._active.session.failure

    def lease(self) -> ModelVersion:
        """The content that serves now, to be used and given back by `with`; SessionClosedError after `close`."""
        while not (version := self._active).take_lease():  # replaced since it was read, or closed
            self._check_open()
        return version

    def update(self) -> bool:
        """Serve what the directory holds now, unless that is served already; returns whether it took over.

        Raises:
            SessionClosedError: `close` has been called.
            HotrowError: the new content cannot be served; the old one continues.
        """
        with self._replacing, contextlib.ExitStack() as held:
            self._check_open()
            if self._active.files == manifest.read_manifest(self._directory):
                return False
            try:
                new = self._load_successor(self._active, held)
            except BaseException:
                self._num_failed_updates += 1
                raise
            self._activate(new)
            return True

    def stats(self) -> dict[str, Any]:
        """As InferenceSession.stats, counting what earlier contents have done too; and `in_place_updates`,
        `failed_in_place_updates`.
        """
        with self._lock:
            total = self._active.session.snapshot()
            if self._draining is not None:
                total = added(self._draining.session.snapshot(), total)
            if self._past is not None:
                total = added(self._past, total)
            updates = {"in_place_updates": self._num_updates, "failed_in_place_updates": self._num_failed_updates}
        return {**total.as_dict(), **updates}

    def close(self) -> None:
        """Stop watching, give no more leases, wait for the last one, close the session. May be called twice."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._replacing:
            self._active.retire()
            self._active.drain()
            self._active.session.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise SessionClosedError(f"the session of {str(self._directory)!r} has been closed")

    def __enter__(self) -> VersionManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<VersionManager of {self._active!r}>"

    def _load_successor(self, old: ModelVersion, held: contextlib.ExitStack) -> ModelVersion:
        """Load the content that may replace the old one, with all updates that the old one answers. The old one applies
        no more updates from some moment until `held` is closed, so that no row is answered older than before.
        """
        upkeep = old.session.upkeep
        upkeep.save_hot_keys()
        if upkeep.shares_rows:  # it must not overwrite the new content's rows with older ones
            held.enter_context(upkeep.updates_held())
        new = self._load()
        with closed_on_error(new.session):
            check_same(self.spec, new.session.spec)
            if new.session.config.has_store:
                _check_same_tables(old.files, new.files)
            else:
                new.session.upkeep.catch_up_with(held.enter_context(upkeep.updates_held()))
        return new

    def _load(self) -> ModelVersion:
        """Open the directory, and make sure that its content did not change meanwhile."""
        before = manifest.file_states(self._directory)
        files = manifest.read_manifest(self._directory)
        session = self._open_session()
        with closed_on_error(session):
            if manifest.file_states(self._directory) != before:
                raise UnavailableError(f"{self._directory}: changed while it was opened")
        return ModelVersion(session, files)

    def _activate(self, new: ModelVersion) -> None:
        """Let a content take over and the old one end. Must be called while holding `_replacing`."""
        with self._lock:
            old, self._active, self._draining = self._active, new, self._active
            self._num_updates += 1
        old.retire()
        old.drain()
        try:
            with self._lock:
                self._draining = None
                ended = old.session.snapshot()
                self._past = ended if self._past is None else added(self._past, ended)
        finally:
            old.session.close()

    def _watch(self, interval_s: float) -> None:
        """Update whenever the manifest has changed; after a failure it tries again, at growing intervals."""
        failure, failed, pause_s, retry_at = "", None, interval_s, 0.0
        while not self._closing.wait(interval_s):
            found = self._manifest_state()
            if failure and found == failed:
                if time.monotonic() < retry_at:
                    continue
                pause_s = min(2 * pause_s, MAX_RETRY_S)
            else:
                pause_s = interval_s
            failure = self._try_update(failure)
            failed, retry_at = found, time.monotonic() + pause_s

    def _manifest_state(self) -> FileState | None:
        """Which file the manifest is at present."""
        with contextlib.suppress(OSError):
            return file_state(self._directory / manifest.MANIFEST_FILE)
        return None

    def _try_update(self, last_failure: str) -> str:
        """Update, or log once and return why not."""
        try:
            if self.update():
                level = logging.WARNING if last_failure else logging.INFO  # shown at the level of the failure's message
                _log.log(level, "%s: now serving its new content", self._directory)
        except SessionClosedError:
            pass  # meanwhile
        except Exception as error:  # noqa: BLE001 - whatever it was, the old content serves, and the watch goes on
            failure = f"{type(error).__name__}: {error}"
            if failure != last_failure:
                _log.error("%s: the new content was rejected, the old one stays active: %s", self._directory, failure)
            return failure
        return ""


def check_same(served: ModelSpec, new: ModelSpec) -> None:
    """Refuse what clients, or Triton's config.pbtxt, would see. What is not listed as content must be the same."""
    before, after = _without_content(served), _without_content(new)
    for name, value in after.items():
        if before[name] != value:
            raise ConfigurationError(
                f"field {name!r} of the new content is {value!r}, but {before[name]!r} is served; "
                "publish it as a new version"
            )


def _without_content(spec: ModelSpec) -> dict[str, Any]:
    """All fields of a spec except those that may differ between contents."""
    document = {name: value for name, value in asdict(spec).items() if name not in _CONTENT}
    tables = [
        {name: value for name, value in table.items() if name not in _TABLE_CONTENT} for table in document["tables"]
    ]
    return {**document, "tables": tables}


def _check_same_tables(served: Iterable[FileEntry], new: Iterable[FileEntry]) -> None:
    """Refuse other rows where stores hold the rows: stores identify versions by number and keep this version's rows."""
    before, after = ({e for e in entries if e.path.parts[0] == TABLES_FOLDER} for entries in (served, new))
    if before != after:
        changed = min(str(entry.path) for entry in before ^ after)
        raise ConfigurationError(
            f"the new content has different rows ({changed}), but the stores hold the old rows under the same version; "
            "publish it as a new version"
        )
