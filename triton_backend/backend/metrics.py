"""The `hotrow_*` metric families on Triton's own /metrics.

A call into Triton's metrics costs tens of microseconds, so a thread compares the session's counters with what it
reported last, twice a second; requests pay nothing. Two generations of one version (a reload in place) have equal
labels and share one counter, which goes on. No process deletes its own metrics: the server crashes when one generation
uses a counter that the other has deleted, an increment fails once its family is gone, and a process that deletes its
metrics while it ends crashes, because it has already left the server. A later process does it (metric_records.py).
"""

from __future__ import annotations

import ctypes
import logging
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import triton_python_backend_utils as pb_utils

from inference_session.platform.repeated_call import RepeatedCall
from triton_backend.backend import metric_records
from triton_backend.backend.heartbeat import RESTARTS_PARAMETER
from triton_backend.backend.metric_records import MetricKey

INTERVAL_S = 0.5

_log = logging.getLogger(__name__)

Family: TypeAlias = "tuple[str, str]"
"""Name and description."""

StatsPath: TypeAlias = "tuple[str, ...]"
"""Where a value is in `InferenceSession.stats`."""

_COUNTERS = {
    "failed_requests": ("hotrow_failed_requests_total", "Requests answered with an error"),
    "samples": ("hotrow_samples_total", "Samples (rows of requests) computed"),
    "in_place_updates": (
        "hotrow_in_place_updates_total",
        "Times that the version switched to new content of its folder",
    ),
    "failed_in_place_updates": (
        "hotrow_failed_in_place_updates_total",
        "Times that new content of the version's folder was rejected",
    ),
    "contexts_total": ("hotrow_contexts_total", "Contexts for which candidates were ranked"),
    "candidates_total": ("hotrow_candidates_total", "Candidates that were ranked"),
    "contexts_reused_total": (
        "hotrow_contexts_reused_total",
        "Contexts reused from an earlier request instead of computed again",
    ),
    "batches": ("hotrow_batches_total", "Runs of the dense network; joined requests count once"),
    "requests": ("hotrow_requests_total", "Requests answered, with predictions or with an error"),
}
_TABLE_COUNTERS = {
    "lookup_keys": ("hotrow_lookup_keys_total", "Keys looked up"),
    "default_vectors": ("hotrow_default_vectors_total", "Keys that are not in their table and get its default vector"),
}
_CACHE_COUNTERS = {
    "hits": ("hotrow_cache_hits_total", "Keys looked up and found in the cache"),
    "misses": ("hotrow_cache_misses_total", "Keys looked up, not found in the cache and fetched from the stores"),
    "evictions": ("hotrow_cache_evictions_total", "Rows dropped from the cache for space"),
}
_TIER_COUNTERS = {
    "hits": ("hotrow_tier_hits_total", "Keys requested from the tier and found"),
    "misses": ("hotrow_tier_misses_total", "Keys requested from the tier and not found"),
    "skipped": ("hotrow_tier_skipped_total", "Keys not requested from the tier because it was down or failed"),
    "failures": ("hotrow_tier_failures_total", "Calls to a tier that failed"),
    "malformed": (
        "hotrow_tier_malformed_total",
        "Keys counted as not found because the tier's value is not a row of their table",
    ),
    "promoted": ("hotrow_tier_promoted_total", "Rows copied into the tier from a tier below"),
}
_UPDATE_COUNTERS = {
    "messages": ("hotrow_update_messages_total", "Messages read from the update stream, rejected ones included"),
    "updated_rows": (
        "hotrow_update_rows_total",
        "Rows applied from the update stream; several updates of one key in a batch count once",
    ),
    "deleted_rows": ("hotrow_update_deleted_rows_total", "Rows deleted by the update stream"),
    "missed_messages": (
        "hotrow_update_missed_messages_total",
        "Messages of the update stream that brokers removed before they were applied",
    ),
    "failures": ("hotrow_update_failures_total", "Times that the update stream waited for brokers or stores"),
}
_UPDATE_GAUGES = {
    "lag_messages": (
        "hotrow_update_lag_messages",
        "Messages of the update stream that are published but not applied yet",
    ),
    "staleness_s": (
        "hotrow_update_staleness_seconds",
        "Time from publishing to serving of the oldest row just applied",
    ),
}
_REJECTED = ("hotrow_update_messages_rejected_total", "Messages of the update stream rejected, by reason")
_TIER_UP = ("hotrow_tier_up", "1 while the tier answers, 0 while it is down and skipped")
_RESTARTS = ("hotrow_backend_restarts_total", "Times that a dead or hung backend process was replaced")
_GAUGES = {
    "loaded_at": ("hotrow_loaded_timestamp_seconds", "When the version was loaded, in seconds since 1970"),
    "load_s": ("hotrow_load_seconds", "Time taken to open the version"),
    "resident_memory": (
        "hotrow_resident_memory_bytes",
        "Memory of the version's process, including mapped pages of tables",
    ),
    "version_info": ("hotrow_model_version_info", "1 while this version is loaded"),
}


def count_restarts(config: Mapping[str, Any], model: str) -> None:
    """Raise the counter to the watch-dog's value. It belongs to the model: it outlives versions and processes."""
    counter = _metric(MetricKey(*_RESTARTS, "counter", (("model", model),)))
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
        self._labels = labels
        self._counters: dict[StatsPath, Any] = {}
        self._gauges: dict[StatsPath, Any] = {}
        self._tiers_up: dict[str, Any] = {}
        self._fixed: dict[str, Any] = {}
        """Those of `_GAUGES`; none before all metrics are made."""
        self._made: list[MetricKey] = []
        self._reported: dict[StatsPath, int] = {}
        self._loaded_at = time.time()
        try:
            self._report()
        except OSError as error:
            _log.warning("%s: no metrics yet, because they cannot be recorded: %s", labels["model"], error)
        failure = "the metrics could not be reported"  # an error of Triton's, say
        self._reports = RepeatedCall("hotrow-metrics", self._report, INTERVAL_S, failure=failure)

    def close(self) -> None:
        """Report what is left, and that the version is gone."""
        self._reports.close()
        if self._fixed:
            self._report()
            self._fixed["version_info"].set(0)
            self._fixed["resident_memory"].set(0)

    def _begin(self, stats: Mapping[str, Any]) -> None:
        """Make all metrics. OSError where they cannot be recorded, as on a full disk: none is made then, because other
        processes might delete them while they are used.
        """
        if (records := metric_records.folder()) is None:
            self._fixed = self._make_all(stats)
        else:
            model, version = self._labels["model"], self._labels["version"]
            with metric_records.locked(records):
                metric_records.claim(records, model, version)
                self._fixed = self._make_all(stats)
                with suppress(OSError):  # then they stay when this process has ended
                    metric_records.write(records, model, version, self._made)
                    metric_records.delete_old(records, model, _delete)
        self._fixed["load_s"].set(stats["load_s"])
        self._fixed["loaded_at"].set(self._loaded_at)

    def _make_all(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """A metric for each value of these statistics that is shown; returns those of `_GAUGES`."""
        for folder, table in stats["tables"].items():
            self._count(_TABLE_COUNTERS, "tables", folder, table=table["name"])
        for folder in stats["cache"].get("tables", ()):
            self._count(_CACHE_COUNTERS, "cache", "tables", folder, table=stats["tables"][folder]["name"])
        for tier in stats["tiers"]:
            self._count(_TIER_COUNTERS, "tiers", tier, tier=tier)
            self._tiers_up[tier] = self._gauge(_TIER_UP, tier=tier)
        if stats["updates"]:
            self._count(_UPDATE_COUNTERS, "updates")
            self._gauges = {("updates", key): self._gauge(one) for key, one in _UPDATE_GAUGES.items()}
            for reason in stats["updates"]["rejected"]:
                self._count({reason: _REJECTED}, "updates", "rejected", reason=reason)
        # Requests come last: a reader that sees them counted sees their effects counted as well.
        self._count(_COUNTERS)
        return {key: self._gauge(one) for key, one in _GAUGES.items()}

    def _report(self) -> None:
        stats = self._stats()
        if not self._fixed:
            self._begin(stats)
        for tier, gauge in self._tiers_up.items():
            gauge.set(int(stats["tiers"][tier]["failure"] is None))
        for path, gauge in self._gauges.items():
            gauge.set(_value(stats, path))
        for path, counter in self._counters.items():
            self._raise_to(counter, path, _value(stats, path))
        # Set in every report: a generation that this one replaced may set it to 0 after this one began.
        self._fixed["version_info"].set(1)
        self._fixed["resident_memory"].set(_resident_bytes())

    def _raise_to(self, counter: Any, path: StatsPath, value: int) -> None:
        """Raise a counter to this value. While the value is lower for a moment, the counter stays; it cannot fall."""
        grown = value - self._reported.get(path, 0)
        if grown > 0:
            counter.increment(grown)
            self._reported[path] = value

    def _count(self, families: Mapping[str, Family], *path: str, **labels: str) -> None:
        """Count values by their name behind `path` in the statistics."""
        for key, one in families.items():
            full_path = (*path, key)
            self._counters[full_path] = self._make(one, "counter", labels)

    def _gauge(self, family: Family, **labels: str) -> Any:
        return self._make(family, "gauge", labels)

    def _make(self, family: Family, kind: str, labels: Mapping[str, str]) -> Any:
        key = MetricKey(*family, kind, tuple({**self._labels, **labels}.items()))
        self._made.append(key)
        return _metric(key)


def _metric(key: MetricKey) -> Any:
    """A metric whose family is never deleted, not even when the interpreter ends."""
    family = _family(key)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))
    return family.Metric(labels=dict(key.labels))


def _delete(key: MetricKey) -> None:
    """Delete a metric that no process uses: a family deletes its metrics when nothing refers to it any more."""
    _family(key).Metric(labels=dict(key.labels))


def _family(key: MetricKey) -> Any:
    kind = {"counter": pb_utils.MetricFamily.COUNTER, "gauge": pb_utils.MetricFamily.GAUGE}[key.kind]
    return pb_utils.MetricFamily(name=key.name, description=key.description, kind=kind)


def _value(stats: Mapping[str, Any], path: StatsPath) -> Any:
    value: Any = stats
    for name in path:
        value = value[name]
    return value


def _resident_bytes() -> int:
    num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(num_pages) * resource.getpagesize()
