"""Stores by URL: the syntax, and its parser.

    redis://[user:password@]host[:port][/db]      rediss:// for TLS
    redis+cluster://[user:password@]host[:port]   any node of a Cluster; rediss+cluster:// for TLS
    redis+sentinel://[user:password@]host[:port],host[:port]/MASTER_NAME[/db]
                                                  the master that sentinels name; rediss+sentinel:// for TLS
    unix://[user:password@]/path/to/socket        Redis's socket on this machine; ?db=N
    rocksdb:///path/to/folder

Options follow behind `?`, as `name=value` with `&` between. `password_file=/path`: a file with the
password. No text made of a URL shows a password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from inference_session.errors import ConfigurationError
from inference_session.urls.options import PASSWORD_FILE, as_query, read_secret, url_options, url_password

_TLS_OPTIONS = ("tls_ca_certificate", "tls_client_certificate", "tls_client_key", "tls_server_name")
SENTINEL_USER, SENTINEL_PASSWORD_FILE = "sentinel_user", "sentinel_password_file"
_SENTINEL_OPTIONS = (SENTINEL_USER, SENTINEL_PASSWORD_FILE)
_SENTINEL_PORT = 26379
_REDIS_OPTIONS = (
    *("partitions", "connections", "overflow_margin", "overflow_policy", "overflow_resolution_target"),
    PASSWORD_FILE,
)
OPTIONS = {
    "redis": _REDIS_OPTIONS,
    "rediss": (*_REDIS_OPTIONS, *_TLS_OPTIONS),
    "redis+cluster": _REDIS_OPTIONS,
    "rediss+cluster": (*_REDIS_OPTIONS, *_TLS_OPTIONS),
    "redis+sentinel": (*_REDIS_OPTIONS, *_SENTINEL_OPTIONS),
    "rediss+sentinel": (*_REDIS_OPTIONS, *_SENTINEL_OPTIONS, *_TLS_OPTIONS),
    "unix": (*_REDIS_OPTIONS, "db"),
    "rocksdb": (),
}
"""The schemes, and the options of each (docs/reference/stores.md says what they mean)."""
DEFAULT_TIMEOUT_MS = 1000


@dataclass(frozen=True)
class StoreUrl:
    """The parts of a store's URL."""

    scheme: str
    host: str = ""
    port: int = 6379
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    path: str = ""
    """Folder or socket."""
    sentinels: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of sentinels."""
    master_name: str = ""
    """The master's name in their configuration."""
    db: int = 0
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_cluster(self) -> bool:
        """Whether it names a node of a Redis Cluster."""
        return self.scheme.endswith("+cluster")

    @property
    def of_sentinels(self) -> StoreUrl:
        """The same for connections to the sentinels, which have their own users and passwords."""
        path = self.options.get(SENTINEL_PASSWORD_FILE)
        options = {name: value for name, value in self.options.items() if name in _TLS_OPTIONS}
        password = None if path is None else read_secret(Path(path))
        login = {} if path is None else {PASSWORD_FILE: path}
        user = self.options.get(SENTINEL_USER)
        return replace(self, user=user, password=password, db=0, options=options | login)

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme.startswith("rediss")

    def current_password(self) -> str | None:
        """The current password: a password file may have changed since."""
        path = self.options.get(PASSWORD_FILE)
        if path is None:
            return self.password
        with suppress(ConfigurationError):  # the file may be being replaced
            return read_secret(Path(path))
        return self.password

    def count(self, name: str, default: int, at_most: int | None = None) -> int:
        """An option that is a whole number from 1, with an upper limit that protects the machine."""
        text = self.options.get(name)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < 1 or (at_most is not None and int(text) > at_most):
            allowed = "whole numbers from 1" + ("" if at_most is None else f" to {at_most}")
            raise ConfigurationError(f"store {str(self)!r}: {name} cannot be {text!r}; allowed: {allowed}")
        return int(text)

    def __str__(self) -> str:
        """The URL with `***` for the password."""
        user = "" if self.user is None else quote(self.user)
        shown = "" if self.password is None or PASSWORD_FILE in self.options else ":***"
        login = f"{user}{shown}@" if user or shown else ""
        host = _bracketed(self.host)
        place = f"{host}:{self.port}" if host else ""
        if self.sentinels:
            place = ",".join(f"{_bracketed(name)}:{port}" for name, port in self.sentinels) + f"/{self.master_name}"
        db = f"/{self.db}" if self.db and not self.path else ""
        return f"{self.scheme}://{login}{place}{self.path}{db}{as_query(self.options)}"

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """Take a URL apart; ConfigurationError says what is wrong, without ever showing a password."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in OPTIONS:
            found = f"scheme {scheme!r} is unknown" if separator else "no scheme"
            raise ConfigurationError(f"not a store's URL: {found}; allowed: {', '.join(f'{s}://' for s in OPTIONS)}")
        hosts = None
        if scheme.endswith("+sentinel"):
            rest, hosts = _without_hosts(rest)
        try:
            # Only the scheme is checked here; urlsplit splits the rest by the rules of any URL with a host.
            parts = urlsplit(f"store://{rest}")
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"a {scheme}:// URL has a malformed host or port") from error
        options = url_options(scheme, parts.query, OPTIONS[scheme])
        url = cls(scheme, user=unquote(parts.username or "") or None, options=options)
        url = url._at(parts, port) if hosts is None else url._at_sentinels(hosts, parts.path)
        return replace(url, password=url_password(unquote(parts.password or "") or None, options))

    def _at(self, parts: SplitResult, port: int | None) -> StoreUrl:
        """The same at the server or folder that the parts name."""
        where = _path(self.scheme, unquote(parts.path), parts.hostname)
        db = self.options.get("db", "0") if where else unquote(parts.path).strip("/") or "0"
        if not db.isdecimal() or (self.is_cluster and db != "0"):
            allowed = "0, the only one of a Cluster" if self.is_cluster else "whole numbers"
            raise ConfigurationError(f"a {self.scheme}:// URL names database {db!r}; allowed: {allowed}")
        host = "" if where else parts.hostname or ""
        return replace(self, host=host, port=port or self.port, path=where, db=int(db))

    def _at_sentinels(self, hosts: str, path: str) -> StoreUrl:
        """The same at the master that a path names; the password for the sentinels must exist."""
        name, _, db = path.strip("/").partition("/")
        if not name or not (db or "0").isdecimal():
            # The found text is not shown: it may be the end of a password that contains a slash.
            raise ConfigurationError(
                f"a {self.scheme}:// URL names no master, or a database that is not a whole number; allowed:"
                f" {self.scheme}://host:port,host:port/NAME, followed by /N for a database other than 0"
            )
        sentinels = tuple(_sentinel(self.scheme, text) for text in hosts.split(","))
        url = replace(self, sentinels=sentinels, master_name=unquote(name), db=int(db or "0"))
        _ = url.of_sentinels
        return url


def _bracketed(host: str) -> str:
    """A host as URLs have it."""
    return f"[{host}]" if ":" in host else host


def _without_hosts(rest: str) -> tuple[str, str]:
    """What follows the scheme without its hosts, and these: `urlsplit` of newer Pythons takes IPv6 addresses for the
    first one only.
    """
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    login, at, hosts = authority.rpartition("@")
    return f"{login}{at}{rest[len(authority) :]}", hosts


def _sentinel(scheme: str, text: str) -> tuple[str, int]:
    """Host and port of one of several sentinels."""
    try:
        parts = urlsplit(f"store://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"a {scheme}:// URL has a malformed host or port") from error
    if not host:
        raise ConfigurationError(
            f"a {scheme}:// URL needs hosts and the master's name: {scheme}://host:port,host:port/NAME"
        )
    return host, port or _SENTINEL_PORT


def _path(scheme: str, path: str, host: str | None) -> str:
    """The path of a scheme that has one; checks that the URL has exactly what its scheme needs."""
    if scheme not in ("unix", "rocksdb"):
        if not host:
            raise ConfigurationError(f"a {scheme}:// URL needs a host: {scheme}://host:port")
        return ""
    if host or path in ("", "/"):
        raise ConfigurationError(f"a {scheme}:// URL needs an absolute path and no host: {scheme}:///path")
    return path
