"""Into how many partitions the rows of each table are divided: the URL says it, or a store's rows show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from inference_session.errors import StoreError
from inference_session.parameter_server.namespace import Namespace
from inference_session.parameter_server.redis import layout
from inference_session.urls.store_url import StoreUrl

_MAX_PARTITIONS = 1 << 16
"""Far above any real use: their names are laid out in memory, and a mistyped number could fill it."""
_PROBE_INTERVAL_S = 2.0
_MAX_MISPLACED = 0.1
"""The accepted fraction of misplaced keys when a partitioning is inferred: others may write to our hashes."""


class Partitionings:
    """The partitionings of a store's tables. What is inferred is inferred again where it may be wrong."""

    def __init__(
        self,
        url: StoreUrl,
        namespace: Namespace,
        tables: Collection[str],
        samples: Callable[[str], Mapping[int, Collection[bytes]]],
    ) -> None:
        """`samples`: reads some keys of each partition of a table that has any."""
        self._url, self._namespace, self._samples = url, namespace, samples
        self._is_given = "partitions" in url.options
        self._partitionings: dict[str, layout.Partitioning] = {}
        self._certain: set[str] = set()
        """Tables whose rows fit only one partitioning."""
        if self._is_given:
            given = layout.Partitioning(url.count("partitions", layout.DEFAULT_PARTITIONS, _MAX_PARTITIONS))
            self._partitionings = dict.fromkeys(tables, given)
            self._certain = set(tables)
        self._doubtful: set[str] = set()
        """Tables without a certain partitioning in which keys were not found."""
        self._next_probe = 0.0

    def of(self, table: str) -> layout.Partitioning:
        """The partitioning of a table; StoreError where its rows fit none."""
        return self._partitionings.get(table) or self._infer(table)

    def doubt(self, tables: Collection[str]) -> None:
        """Keys were not found in these tables: perhaps only because their partitioning is another."""
        self._doubtful |= {*tables} - self._certain

    def doubt_all(self) -> None:
        """Others may have filled the store since the partitionings were inferred."""
        if not self._is_given:
            self._certain.clear()
            self._doubtful, self._next_probe = set(self._partitionings), 0.0

    def infer_doubtful(self) -> None:
        """Infer again what is in doubt, at most once in a while."""
        if self._doubtful and time.monotonic() >= self._next_probe:
            self._next_probe = time.monotonic() + _PROBE_INTERVAL_S
            doubtful, self._doubtful = self._doubtful, set()
            for table in doubtful:
                self._infer(table)

    def _infer(self, table: str) -> layout.Partitioning:
        """Infer the partitioning from rows; where several fit, the one in use stays if it is among them."""
        samples = self._samples(table)
        fitting = layout.fitting_partitionings(samples) or layout.fitting_partitionings(samples, _MAX_MISPLACED)
        if not fitting:
            raise StoreError(
                f"table {self._namespace.tag(table)!r} in {str(self._url)!r}: its rows match no number of partitions"
                f" up to {layout.MAX_PROBED_PARTITIONS}; add ?partitions=N to the URL if you know it"
            )
        if len(fitting) == 1:
            self._certain.add(table)
        used = self._partitionings.get(table)
        partitioning = self._partitionings[table] = used if used in fitting else fitting[0]
        return partitioning
