"""URLs of HDFS: `hdfs://HOST[:PORT]/path`, where PORT is that of the NameNode's WebHDFS, which speaks HTTP."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from inference_session.errors import ConfigurationError

_DEFAULT_PORTS = {"hdfs": 9870, "webhdfs": 9870, "swebhdfs": 9871}
"""The schemes, and Hadoop 3's port for each; `swebhdfs` is Hadoop's own name for WebHDFS over TLS."""


@dataclass(frozen=True)
class HdfsUrl:
    """The parts of a URL. The path is taken literally: `%` and the like have no special meaning, as in Hadoop."""

    scheme: str
    host: str
    port: int
    path: str
    """Absolute and normalised."""

    @classmethod
    def parse(cls, text: str) -> HdfsUrl:
        """Take a URL apart; ConfigurationError says what is wrong. The part before an `@` is never shown."""
        scheme, _, rest = text.partition("://")
        if scheme not in _DEFAULT_PORTS:
            allowed = ", ".join(f"{name}://" for name in _DEFAULT_PORTS)
            raise ConfigurationError(f"files cannot be read from {scheme}:// URLs; allowed: a path, {allowed}")
        authority, slash, path = rest.partition("/")
        if "@" in authority:
            raise ConfigurationError(f"a {scheme}:// URL names no user: set HADOOP_USER_NAME instead")
        try:
            parts = urlsplit(f"{scheme}://{authority}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"{text!r} has a malformed host or port") from error
        if not host or port == 0:
            raise ConfigurationError(f"{text!r} needs the NameNode's host: {scheme}://HOST:PORT/path")
        if not slash:
            raise ConfigurationError(f"{text!r} has no path: {scheme}://HOST:PORT/path")
        return cls(scheme, host, port or _DEFAULT_PORTS[scheme], posixpath.normpath("/" + path.lstrip("/")))

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def default_port(self) -> int:
        """Hadoop's own for the scheme."""
        return _DEFAULT_PORTS[self.scheme]

    @property
    def http_url(self) -> str:
        """Where WebHDFS answers."""
        return f"{'https' if self.scheme == 'swebhdfs' else 'http'}://{self.address}"

    def split(self) -> tuple[HdfsUrl, str]:
        """The URL of the folder above, and the name in it."""
        folder, name = posixpath.split(self.path)
        if not name:
            raise ConfigurationError(f"{str(self)!r} is the root folder, which cannot be created")
        return replace(self, path=folder), name

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}"
