"""What answers: sessions of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inference_session import InferenceSession
from inference_session.versions import VersionManager
from tests.campaign.contents import Arrays


class SessionTarget:
    """The version that serves, replaced while requests are under way, as a server would."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._manager: VersionManager | None = None
        self._leases: dict[VersionManager, int] = {}
        self._free = threading.Condition()

    def ask(self, inputs: Arrays) -> Arrays:
        """One request."""
        with self._leased() as manager, manager.lease() as session:
            return dict(session.run(inputs))

    @property
    def session(self) -> InferenceSession:
        """The session that serves, for one who replaces it himself."""
        assert self._manager is not None
        with self._manager.lease() as session:
            return session

    def load(self, directory: Path) -> None:
        """Open a version, let it take over, and close the old one."""
        new = VersionManager(directory, lambda: InferenceSession.open(directory, **self._settings))
        with self._free:
            old, self._manager = self._manager, new
            self._leases[new] = 0
        self._end(old)

    def update_in_place(self) -> bool:
        """Serve what the version's folder holds now."""
        assert self._manager is not None
        return self._manager.update()

    def stats(self) -> dict[str, Any]:
        """Of the session that serves."""
        return self.session.stats()

    def close(self) -> None:
        """Answer no more."""
        old, self._manager = self._manager, None
        self._end(old)

    def _end(self, manager: VersionManager | None) -> None:
        if manager is not None:
            with self._free:
                self._free.wait_for(lambda: not self._leases[manager])
                del self._leases[manager]
            manager.close()

    @contextlib.contextmanager
    def _leased(self) -> Iterator[VersionManager]:
        with self._free:
            manager = self._manager
            assert manager is not None
            self._leases[manager] += 1
        try:
            yield manager
        finally:
            with self._free:
                self._leases[manager] -= 1
                self._free.notify_all()
