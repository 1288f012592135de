"""ModelVersion: a session, and who is using it."""

from __future__ import annotations

import threading

from inference_session.session import InferenceSession
from inference_session.version_directory.manifest import FileEntry


class ModelVersion:
    """One loaded content of a version directory. A caller that holds a lease on it may use its session.

    `VersionManager.lease` gives leases; `with` ends one.
    """

    def __init__(self, session: InferenceSession, files: tuple[FileEntry, ...] = ()) -> None:
        """`files`: what the manifest lists that the session was opened with."""
        self.session, self.files = session, files
        self._leases: list[None] = []
        """An item for each lease. Requests take no lock: Python adds or removes an item in one step."""
        self._changed = threading.Condition()
        self._retired = False

    def take_lease(self) -> bool:
        """Count one more user; False once the version is retired, after which it accepts no users."""
        self._leases.append(None)
        if self._retired:  # looked at afterwards: `drain` waits for a lease that was taken before
            self.__exit__(None, None, None)
            return False
        return True

    def retire(self) -> None:
        """Stop giving leases."""
        with self._changed:
            self._retired = True

    def drain(self) -> None:
        """Wait until the last lease has ended. Call `retire` before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._leases)

    def __enter__(self) -> InferenceSession:
        return self.session

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        self._leases.pop()
        if self._retired:  # looked at afterwards: it is set before `drain` looks at the leases
            with self._changed:
                self._changed.notify_all()

    def __repr__(self) -> str:
        state = "retired" if self._retired else "active"
        return f"<ModelVersion {str(self.session.directory)!r} [{state}, {len(self._leases)} leases]>"
