"""Removes the rows of old versions from the volatile store, where each version has rows of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from inference_session.errors import HotrowError
from inference_session.parameter_server.base import EmbeddingStore

DELAY_S = 10.0
"""Time between opening a version and removing older ones: until then the new version may still fail to serve."""
_CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


def retired_versions(versions: Collection[str], current: str, num_kept: int) -> list[str]:
    """The versions to remove: all but the newest `num_kept` up to the current one. Newer versions, and names that are
    not numbers, are kept.
    """
    older = sorted((v for v in versions if v.isdecimal() and int(v) < int(current)), key=int)
    return older[: max(0, len(older) - (num_kept - 1))]


class Retirement:
    """Removes the rows of retired versions, once, in its own thread. The rows must exist elsewhere: `is_safe`
    says whether the tiers below have a version's rows as well.
    """

    def __init__(self, store: EmbeddingStore, current: str, num_kept: int, is_safe: Callable[[str], bool]) -> None:
        self._store = store
        self._current = current
        self._num_kept = num_kept
        self._is_safe = is_safe
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotrow-retirement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove no further versions. May be called twice."""
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        if self._closing.wait(DELAY_S):
            return
        try:
            retired = retired_versions(self._store.versions(), self._current, self._num_kept)
            removable = [version for version in retired if self._is_safe(version)]
            if removable and not self._closing.is_set():
                num_tables = self._store.remove_versions(removable)
                _log.info("removed %d tables of versions %s from %r", num_tables, ", ".join(removable), self._store)
        except HotrowError as error:  # the next version that opens removes the rest
            _log.warning("retired versions could not be removed from %r: %s", self._store, error)
