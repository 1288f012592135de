"""Options of a URL: `name=value` behind its `?`, with `&` between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

from inference_session.errors import ConfigurationError


def url_options(scheme: str, query: str, allowed: Sequence[str]) -> dict[str, str]:
    """The options in a query; ConfigurationError names the first that is not allowed."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        names = ", ".join(allowed) or "none"
        raise ConfigurationError(f"a {scheme}:// URL has the unknown option {unknown[0]!r}; allowed: {names}")
    return options


def as_query(options: Mapping[str, str]) -> str:
    """The end of a URL with these options; empty if there are none."""
    return "".join(f"{'&' if i else '?'}{name}={value}" for i, (name, value) in enumerate(options.items()))
