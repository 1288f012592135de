"""Statistics: what a session counts. Counters are API: docs/reference/statistics.md defines each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_session.kernels.cpu.keys import BATCH_COUNTS, count_batch
from inference_session.kernels.machine_code import of_ints
from inference_session.kernels.records import address_of
from inference_session.model_spec import ModelSpec

Stats = TypeVar("Stats")

_GAUGE = "gauge"


def gauge() -> Any:
    """A field of statistics that goes up and down. Other whole numbers are counters."""
    return field(metadata={_GAUGE: True})


def added(earlier: Stats, later: Stats) -> Stats:
    """Merge the statistics of two sessions that served in turn: counters add up, other values are the later one's."""
    total: Stats = _added(earlier, later)
    return total


def _added(earlier: Any, later: Any) -> Any:
    if type(later) is int and type(earlier) is int:
        return earlier + later
    if isinstance(later, Mapping) and isinstance(earlier, Mapping):
        return {key: _added(earlier[key], value) if key in earlier else value for key, value in later.items()}
    if not is_dataclass(later) or isinstance(later, type) or type(earlier) is not type(later):
        return later
    values = {
        each.name: getattr(later, each.name)
        if _GAUGE in each.metadata
        else _added(getattr(earlier, each.name), getattr(later, each.name))
        for each in fields(later)
    }
    return type(later)(**values)


@dataclass(frozen=True)
class LookupStats:
    """The look-ups of one table."""

    name: str
    lookup_keys: int
    default_vectors: int
    """Keys that were answered with the default vector."""


@dataclass(frozen=True)
class SessionCounts:
    """Counters of a session's answers."""

    requests: int
    failed_requests: int
    samples: int
    batches: int
    contexts_total: int
    candidates_total: int
    contexts_reused_total: int
    load_s: float
    """Time it took to open the version."""
    tables: Mapping[str, LookupStats]
    """By folder."""


class SessionStats:
    """Counters of one session, each updated once per batch. Thread-safe."""

    def __init__(self, spec: ModelSpec) -> None:
        self._lock = Lock()
        self._names = {table.folder: table.name for table in spec.tables}
        self._num_keys = np.zeros(len(self._names), np.int64)
        self._num_unknown = np.zeros(len(self._names), np.int64)
        self._staged = np.zeros(BATCH_COUNTS + 2 * len(self._names), np.int64)
        """What compiled code counts: see `count_batch`."""
        self.count_staged = partial(of_ints(count_batch), address_of(self._staged))
        """Counts a batch of requests that were all answered: takes the number of samples, `Lookup.find_places`, and
        the number of requests. It keeps the GIL, and so needs no lock.
        """
        self.load_s = 0.0
        self.reset()

    def reset(self) -> None:
        """Count from 0 again."""
        self._requests = 0
        self._samples = 0
        self._failed_requests = 0
        self._batches = 0
        self._contexts = 0
        self._candidates = 0
        self._contexts_reused = 0
        for counts in (self._num_keys, self._num_unknown, self._staged):
            counts[:] = 0

    def count_requests(self, num_requests: int, num_failed: int) -> None:
        """Requests that have been answered, with predictions or with an error."""
        with self._lock:
            self._requests += num_requests
            self._failed_requests += num_failed

    def count_batch(self, num_samples: int) -> None:
        """One computed batch."""
        with self._lock:
            self._batches += 1
            self._samples += num_samples

    def count_keys(self, tables: NDArray[np.intp], num_keys: NDArray[np.int64], num_unknown: NDArray[np.int64]) -> None:
        """One look-up; int64 [look-ups of the model]: their keys, each of the table with that number."""
        with self._lock:
            self._num_keys += np.bincount(tables, num_keys, len(self._names)).astype(np.int64)
            if num_unknown.any():
                self._num_unknown += np.bincount(tables, num_unknown, len(self._names)).astype(np.int64)

    def count_contexts(self, num_contexts: int, num_candidates: int, num_reused: int) -> None:
        """Count what a batch of a model with context inputs ranked, and how many of its contexts were already kept."""
        with self._lock:
            self._contexts += num_contexts
            self._candidates += num_candidates
            self._contexts_reused += num_reused

    def num_looked_up(self) -> int:
        """Keys of all look-ups so far."""
        with self._lock:
            return int(self._num_keys.sum() + self._staged[BATCH_COUNTS::2].sum())

    def snapshot(self) -> SessionCounts:
        """All counters at one moment."""
        with self._lock:
            staged = self._staged.copy()
            requests, batches, samples = staged[:BATCH_COUNTS].tolist()
            return SessionCounts(
                requests=self._requests + requests,
                failed_requests=self._failed_requests,
                samples=self._samples + samples,
                batches=self._batches + batches,
                contexts_total=self._contexts,
                candidates_total=self._candidates,
                contexts_reused_total=self._contexts_reused,
                load_s=self.load_s,
                tables=self._tables(staged[BATCH_COUNTS:].reshape(-1, 2)),
            )

    def _tables(self, staged: NDArray[np.int64]) -> dict[str, LookupStats]:
        """Per table folder; `staged`: keys and unknown keys of each. Must be called while holding the lock."""
        num_keys, num_unknown = (self._num_keys + staged[:, 0]).tolist(), (self._num_unknown + staged[:, 1]).tolist()
        return {
            folder: LookupStats(name, keys, unknown)
            for (folder, name), keys, unknown in zip(self._names.items(), num_keys, num_unknown, strict=True)
        }
