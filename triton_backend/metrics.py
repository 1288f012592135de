"""The `hotrow_*` families on Triton's own /metrics.

A call into Triton's metrics costs tens of microseconds, so a thread compares the session's counters with what it
reported last, twice a second; requests pay nothing. Two generations of one version (a reload in place) have equal
labels and share one counter, which goes on. Metrics are never deleted: the server crashes when one generation uses
a counter that the other has deleted, and an increment fails once its family is gone.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from triton_backend import heartbeat
from triton_backend.stubs import RESTARTS_PARAMETER

INTERVAL_S = 0.5

_COUNTERS = {
    "failed_requests": ("hotrow_failed_requests_total", "Requests answered with an error"),
    "samples": ("hotrow_samples_total", "Samples (rows of requests) computed"),
    "in_place_updates": ("hotrow_in_place_updates_total", "Times that new content of the version's folder took over"),
    "failed_in_place_updates": ("hotrow_failed_in_place_updates_total", "Times that such content was not fit to serve"),
    "batches": ("hotrow_batches_total", "Runs of the dense network; requests joined into one count once"),
    "requests": ("hotrow_requests_total", "Requests answered, with predictions or with an error"),
}
_TABLE_COUNTERS = {
    "lookup_keys": ("hotrow_lookup_keys_total", "Keys looked up"),
    "default_vectors": ("hotrow_default_vectors_total", "Keys unknown to their table, answered by its default vector"),
}
_CACHE_COUNTERS = {
    "hits": ("hotrow_cache_hits_total", "Keys looked up that were in the cache"),
    "misses": ("hotrow_cache_misses_total", "Keys looked up that were not in the cache, and fetched from the stores"),
    "evictions": ("hotrow_cache_evictions_total", "Rows dropped from the cache for space"),
}
_TIER_COUNTERS = {
    "hits": ("hotrow_tier_hits_total", "Keys that a tier was asked for and had"),
    "misses": ("hotrow_tier_misses_total", "Keys that a tier was asked for and had not"),
    "skipped": ("hotrow_tier_skipped_total", "Keys that a tier was not asked for because it was down, or failed"),
    "failures": ("hotrow_tier_failures_total", "Calls to a tier that failed"),
    "promoted": ("hotrow_tier_promoted_total", "Rows inserted into a tier because one below had them"),
}
_UPDATE_COUNTERS = {
    "messages": ("hotrow_update_messages_total", "Messages of the update stream read, refused ones included"),
    "updated_rows": (
        "hotrow_update_rows_total",
        "Rows of the update stream applied; of several of a key in one go the last",
    ),
    "deleted_rows": ("hotrow_update_deleted_rows_total", "Rows deleted by the update stream"),
    "failures": ("hotrow_update_failures_total", "Times that brokers or stores kept the update stream waiting"),
}
_UPDATE_GAUGES = {
    "lag_messages": ("hotrow_update_lag_messages", "Messages of the update stream published, and not applied yet"),
    "staleness_s": (
        "hotrow_update_staleness_seconds",
        "Time from publishing to serving of the oldest row just applied",
    ),
}
_REJECTED = {
    "rejected": ("hotrow_update_messages_rejected_total", "Messages of the update stream set aside, by reason"),
}
_TIER_GAUGES = {"up": ("hotrow_tier_up", "1 while the tier answers, 0 while it is down and requests go past it")}
_RESTARTS = (
    "hotrow_backend_restarts_total",
    "Times that a dead or hung backend process was replaced",
)
_GAUGES = {
    "loaded_at": ("hotrow_loaded_timestamp_seconds", "When the version was loaded, in seconds since 1970"),
    "load_s": ("hotrow_load_seconds", "Time it took to open the version"),
    "resident_memory": (
        "hotrow_resident_memory_bytes",
        "Memory of the version's process, mapped pages of tables included",
    ),
    "version_info": ("hotrow_model_version_info", "1 while this version is loaded"),
}


_restarts: list[Any] = []
"""The family: a metric fails once it is gone."""


def count_restarts(config: Mapping[str, Any], model: str) -> None:
    """Bring the counter up to what the watch-dog says. It is the model's, and outlives versions and processes."""
    name, description = _RESTARTS
    _restarts.append(pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER))
    counter = _restarts[-1].Metric(labels={"model": model})
    said = int(config.get("parameters", {}).get(RESTARTS_PARAMETER, {"string_value": "0"})["string_value"])
    if (more := said - counter.value()) > 0:
        counter.increment(more)


class SessionMetrics:
    """Keeps the metrics of one loaded version up to date until closed.

    Args:
        stats: gives the counters, as `InferenceSession.stats` does.
        labels: `model` and `version`.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]], labels: Mapping[str, str]) -> None:
        self._stats = stats
        self._labels = dict(labels)
        self._families: list[Any] = []  # a metric fails once its family is gone
        first = stats()
        self._counters = self._make(_COUNTERS, pb_utils.MetricFamily.COUNTER, self._labels)
        self._tables = {
            folder: self._make(_TABLE_COUNTERS, pb_utils.MetricFamily.COUNTER, self._of_table(first, folder))
            for folder in first["tables"]
        }
        self._cache = {
            folder: self._make(_CACHE_COUNTERS, pb_utils.MetricFamily.COUNTER, self._of_table(first, folder))
            for folder in first["cache"].get("tables", ())
        }
        self._tiers = {
            tier: self._make(_TIER_COUNTERS, pb_utils.MetricFamily.COUNTER, {**self._labels, "tier": tier})
            for tier in first["tiers"]
        }
        self._tiers_up = {
            tier: self._make(_TIER_GAUGES, pb_utils.MetricFamily.GAUGE, {**self._labels, "tier": tier})["up"]
            for tier in first["tiers"]
        }
        updates = first["updates"]
        self._updates = self._make(_UPDATE_COUNTERS if updates else {}, pb_utils.MetricFamily.COUNTER, self._labels)
        self._update_gauges = self._make(_UPDATE_GAUGES if updates else {}, pb_utils.MetricFamily.GAUGE, self._labels)
        self._rejected = {
            reason: self._make(_REJECTED, pb_utils.MetricFamily.COUNTER, {**self._labels, "reason": reason})["rejected"]
            for reason in updates.get("rejected", ())
        }
        gauges = self._make(_GAUGES, pb_utils.MetricFamily.GAUGE, self._labels)
        gauges["load_s"].set(first["load_s"])
        gauges["loaded_at"].set(time.time())
        self._version_info = gauges["version_info"]
        self._resident_memory = gauges["resident_memory"]
        self._reported: dict[tuple[str, ...], int] = {}
        self._report()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotrow-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report what is left, and that the version is gone."""
        self._closing.set()
        self._thread.join()
        self._report()
        self._version_info.set(0)
        self._resident_memory.set(0)

    def _work(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            if not heartbeat.is_orphan():
                self._report()

    def _report(self) -> None:
        stats = self._stats()
        for group, members, values in (
            ("tables", self._tables, stats["tables"]),
            ("cache", self._cache, stats["cache"].get("tables", {})),
            ("tiers", self._tiers, stats["tiers"]),
        ):
            for name, counters in members.items():
                for key, counter in counters.items():
                    self._raise_to(counter, (group, name, key), values[name][key])
        for key, counter in self._updates.items():
            self._raise_to(counter, ("updates", key), stats["updates"][key])
        for reason, counter in self._rejected.items():
            self._raise_to(counter, ("updates", "rejected", reason), stats["updates"]["rejected"][reason])
        for key, gauge in self._update_gauges.items():
            gauge.set(stats["updates"][key])
        for tier, gauge in self._tiers_up.items():
            gauge.set(int(stats["tiers"][tier]["failure"] is None))
        # Requests come last of all: whoever sees them counted sees what they did counted as well.
        for key, counter in self._counters.items():
            self._raise_to(counter, (key,), stats[key])
        # Again and again: a generation that this one replaced may set it to 0 after this one began.
        self._version_info.set(1)
        self._resident_memory.set(_resident_bytes())

    def _of_table(self, stats: Mapping[str, Any], folder: str) -> dict[str, str]:
        return {**self._labels, "table": stats["tables"][folder]["name"]}

    def _raise_to(self, counter: Any, key: tuple[str, ...], value: int) -> None:
        grown = value - self._reported.get(key, 0)
        if grown:
            counter.increment(grown)
            self._reported[key] = value

    def _make(self, families: Mapping[str, tuple[str, str]], kind: Any, labels: Mapping[str, str]) -> dict[str, Any]:
        metrics = {}
        for key, (name, description) in families.items():
            family = pb_utils.MetricFamily(name=name, description=description, kind=kind)
            self._families.append(family)
            metrics[key] = family.Metric(labels=dict(labels))
        return metrics


def _resident_bytes() -> int:
    num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(num_pages) * resource.getpagesize()
