"""One store of the parameter server's stack: what part it has there, and how it has been doing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_session.errors import HotrowError, StoreError, UnavailableError
from inference_session.parameter_server.base import EmbeddingStore

STEADY_S = 10.0
"""A tier that was back for less than this is unsteady, and left out for longer each time."""
MAX_UNWRITTEN_KEYS = 1_000_000
"""Keys of a table that are remembered for a volatile tier that is out; with more of them it drops the whole table."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S = 0.5, 16.0
"""The shortest and the longest that an unsteady tier is left out before it is tried again."""


@dataclass(eq=False)
class Tier:
    """One store of the stack, and how it has been doing. Written to under the server's lock."""

    name: str
    store: EmbeddingStore
    volatile: bool = False
    """It may lose rows, and need not have what a tier below has."""
    durable: bool = False
    """What is written to it outlives all processes; it takes notes as well."""
    cache_missed_keys: bool = False
    """Whether rows found further down are inserted here."""
    touches: bool = False
    """Whether rows that are read here are to be marked as used."""
    failure: str | None = None
    """Why the tier is left out at the moment; None: it is in use."""
    last_error: str = ""
    """Of its last failure."""
    is_suspect: bool = False
    """It refused something: whether it refuses all, as after a change of passwords, is to be found out."""
    incarnation: str = ""
    """Of the store, when it was last looked after."""
    back_since: float = -math.inf
    """When the tier last came back."""
    retry_pause_s: float = 0.0
    retry_at: float = 0.0
    """When it is tried again."""
    unwritten: dict[str, list[NDArray[np.int64]] | None] = field(default_factory=dict)
    """Keys, by table, whose newest rows could not be written here; the tier is left out until it has dropped them.
    None: too many to remember, it drops the whole table."""
    hits: int = 0
    misses: int = 0
    skipped: int = 0
    """Keys that were not asked for here because the tier was left out or failed."""
    failures: int = 0
    paused_until: float = 0.0
    """When rows may be promoted or touched here again after that was refused; 0: now."""
    outages: int = 0
    """Times that the tier was left out, the present one included."""
    promoted: int = 0
    """Rows inserted because a lower tier had them."""
    touched: int = 0
    """Rows marked as used."""

    def begin_outage(self, failure: str) -> None:
        """Leave the tier out. One that answers a check but no requests must not make them wait again and again."""
        now = time.monotonic()
        self.failure = failure
        self.outages += 1
        unsteady = now - self.back_since < STEADY_S
        self.retry_pause_s = min(max(MIN_RETRY_PAUSE_S, 2 * self.retry_pause_s), MAX_RETRY_PAUSE_S) if unsteady else 0.0
        self.retry_at = now + self.retry_pause_s

    def attempt(self, act: Callable[[EmbeddingStore], None]) -> HotrowError | None:
        """Do something to the store, or say why not. A volatile tier that is out is not even tried."""
        if self.failure is not None and self.volatile:
            return UnavailableError(self.failure)
        try:
            act(self.store)
        except (UnavailableError, StoreError) as error:
            return error
        return None

    def remember_unwritten(self, table: str, keys: NDArray[np.int64]) -> None:
        """The newest rows of these keys could not be written here. Must be called while nobody else writes."""
        unwritten = self.unwritten.setdefault(table, [])
        if unwritten is not None:
            unwritten.append(keys.copy())
            if sum(map(len, unwritten)) > MAX_UNWRITTEN_KEYS:
                self.unwritten[table] = None

    def drop_unwritten(self, table: str) -> None:
        """Drop rows whose newer ones could not be written. Must be called while nobody else writes."""
        keys = self.unwritten[table]
        if keys is None:
            self.store.clear(table)
        else:
            self.store.erase(table, np.concatenate(keys))
        del self.unwritten[table]

    def counters(self) -> dict[str, Any]:
        """What `ParameterServer.stats` says of the tier."""
        names = ("failure", "hits", "misses", "skipped", "failures", "outages", "promoted", "touched")
        return {name: getattr(self, name) for name in names}
