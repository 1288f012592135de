"""A server's /metrics page: fetched, parsed (Prometheus's text format), and two of them compared."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inference_session.errors import UnavailableError

Labels = frozenset[tuple[str, str]]

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPED = re.compile(r"\\(.)")
_MOST_BYTES = 64 << 20
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without proxies: watched servers are near, and the environment's proxies are for remote hosts."""


def page_url(text: str) -> str:
    """The URL of a server's page, where `http://` and `/metrics` may have been left out."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    return url if "/" in url.partition("://")[2] else f"{url}/metrics"


def unreadable(url: str, error: Exception) -> UnavailableError:
    """The error of a command that needs the page."""
    return UnavailableError(
        f"{url}: cannot read the metrics of a server: {error}; `hotrow serve` prints their URL, --metrics-url takes it"
    )


@dataclass(frozen=True)
class MetricsPage:
    """All samples at one moment."""

    time_s: float = 0.0
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    """By metric, then by labels."""

    @classmethod
    def fetch(cls, url: str, *, timeout_s: float = 5.0) -> MetricsPage:
        """The current page.

        Raises:
            OSError: the server does not answer.
            ValueError: the response is no metrics page.
        """
        try:
            with _direct.open(url, timeout=timeout_s) as response:
                text = response.read(_MOST_BYTES).decode("utf-8")
        except urllib.error.HTTPError as error:
            error.close()
            raise
        except urllib.error.URLError as error:
            raise ConnectionError(getattr(error.reason, "strerror", None) or str(error.reason)) from error
        except http.client.HTTPException as error:
            raise ValueError(f"no HTTP answer: {error!r}") from error
        return cls.parse(text, time.monotonic())

    @classmethod
    def parse(cls, text: str, time_s: float = 0.0) -> MetricsPage:
        """The samples of a page; ValueError names the first invalid line."""
        samples: dict[str, dict[Labels, float]] = {}
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            match = _SAMPLE.fullmatch(line.strip())
            if match is None:
                raise ValueError(f"not a line of Prometheus metrics: {line[:80]!r}")
            name, labels, value = match.groups()
            if math.isfinite(number := float(value)):  # Prometheus's NaN means that nothing has been observed
                samples.setdefault(name, {})[_labels(labels or "")] = number
        return cls(time_s, samples)

    def values(self, name: str, *needed: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """The samples of a metric that have the needed labels and contain these."""
        wanted = set(labels.items())
        for found, value in self.samples.get(name, {}).items():
            if wanted <= found and set(needed) <= {label for label, _ in found}:
                yield dict(found), value

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of those samples; None where there are none."""
        values = [value for _, value in self.values(name, **labels)]
        return sum(values) if values else None


@dataclass(frozen=True)
class Window:
    """The changes between two pages of one server."""

    before: MetricsPage
    after: MetricsPage

    @property
    def seconds(self) -> float:
        """Seconds between the two."""
        return max(self.after.time_s - self.before.time_s, 1e-9)

    def grown(self, name: str, **labels: str) -> float | None:
        """The increase of the counters with these labels; None if there are none.

        A counter that has fallen was reset by a restart of its server.
        """
        if self.after.total(name, **labels) is None:
            return None
        before = self.before.samples.get(name, {})
        grown = 0.0
        for found, value in self.after.samples[name].items():
            if set(labels.items()) <= found:
                earlier = before.get(found, 0.0)
                grown += value - earlier if value >= earlier else value
        return grown

    def per_second(self, name: str, **labels: str) -> float | None:
        """The rate of these counters."""
        grown = self.grown(name, **labels)
        return None if grown is None else grown / self.seconds

    def ratio(self, part: str, *wholes: str, **labels: str) -> float | None:
        """The increase of one counter divided by the total increase of others; None if nothing was counted."""
        whole = sum(self.grown(name, **labels) or 0.0 for name in wholes)
        return (self.grown(part, **labels) or 0.0) / whole if whole else None


def _labels(text: str) -> Labels:
    return frozenset((name, _ESCAPED.sub(_unescaped, value)) for name, value in _LABEL.findall(text))


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
