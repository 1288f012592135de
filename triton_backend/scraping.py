"""Reads a server's /metrics: Prometheus's text format, as far as Triton writes it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inference_session.errors import ConfigurationError, UnavailableError

_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Samples:
    """What a page of metrics holds: name, labels, value."""

    samples: Sequence[tuple[str, Mapping[str, str], float]]

    def total(self, name: str, labels: Mapping[str, str]) -> float:
        """The sum of the samples of that name with these labels, whatever others they have."""
        return sum(value for found, of, value in self.samples if found == name and labels.items() <= of.items())


def parse(page: str) -> Samples:
    """The samples of a page; lines that are none are left out."""
    matches = (_SAMPLE.match(line) for line in page.splitlines() if not line.startswith("#"))
    return Samples([(m["name"], dict(_LABEL.findall(m["labels"] or "")), float(m["value"])) for m in matches if m])


def scrape(url: str) -> Samples:
    """The samples at a URL; UnavailableError where nobody answers."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"{url!r} is no address of metrics; wanted: http://HOST:PORT/metrics")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as page:
            return parse(page.read().decode(errors="replace"))
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{url}: no metrics there: {error}") from error
