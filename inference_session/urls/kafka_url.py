"""The brokers of an update stream by URL.

    kafka://[user:password@]host[:port][,host[:port]…][?option=value&…]

Options: `security_protocol` (plaintext, ssl, sasl_plaintext, sasl_ssl), `sasl_mechanism` (PLAIN, SCRAM-SHA-256 …), and
`tls_ca_certificate`, `tls_client_certificate`, `tls_client_key`, `password_file` (files). No text made of a URL shows a
password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from inference_session.errors import ConfigurationError
from inference_session.urls.options import PASSWORD_FILE, as_query, url_options, url_password

SCHEME = "kafka"
DEFAULT_PORT = 9092

_OPTIONS = {
    "security_protocol": "security.protocol",
    "sasl_mechanism": "sasl.mechanism",
    "tls_ca_certificate": "ssl.ca.location",
    "tls_client_certificate": "ssl.certificate.location",
    "tls_client_key": "ssl.key.location",
}
_BROKER = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class KafkaUrl:
    """The parts of a stream's URL."""

    brokers: tuple[str, ...]
    """host:port of each broker to begin with."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    def client_settings(self) -> dict[str, str]:
        """The settings of librdkafka that reach these brokers."""
        settings = {"bootstrap.servers": ",".join(self.brokers)}
        if self.user is not None:
            settings |= {"sasl.username": self.user, "sasl.password": self.password or ""}
            settings |= {"security.protocol": "sasl_plaintext", "sasl.mechanism": "PLAIN"}
        return settings | {_OPTIONS[name]: value for name, value in self.options.items() if name != PASSWORD_FILE}

    def __str__(self) -> str:
        """The URL with `***` for the password."""
        login = "" if self.user is None else f"{self.user}{'' if PASSWORD_FILE in self.options else ':***'}@"
        return f"{SCHEME}://{login}{','.join(self.brokers)}{as_query(self.options)}"

    @classmethod
    def parse(cls, text: str) -> KafkaUrl:
        """Take a URL apart; ConfigurationError says what is wrong, without ever showing a password."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme != SCHEME:
            found = f"scheme {scheme!r} is unknown" if separator else "no scheme"
            raise ConfigurationError(f"not an update stream's URL: {found}; allowed: kafka://HOST:PORT[,HOST:PORT]")
        place, _, query = rest.partition("?")
        login, separator, hosts = place.rpartition("@")
        user, _, password = login.partition(":")
        options = url_options(SCHEME, query, (*_OPTIONS, PASSWORD_FILE))
        if PASSWORD_FILE in options and not user:
            raise ConfigurationError(
                f"a kafka:// URL with {PASSWORD_FILE} needs a user: kafka://USER@HOST:PORT?{PASSWORD_FILE}=/path"
            )
        return cls(
            tuple(_broker(host) for host in hosts.rstrip("/").split(",")),
            user=unquote(user) if separator else None,
            password=url_password(unquote(password) if separator else None, options),
            options=options,
        )


def _broker(text: str) -> str:
    match = _BROKER.fullmatch(text)
    if match is None or not 0 < int(match["port"] or DEFAULT_PORT) < 2**16:
        raise ConfigurationError("a kafka:// URL has a malformed host or port; allowed: kafka://HOST:PORT[,HOST:PORT]")
    return f"{match['host']}:{match['port'] or DEFAULT_PORT}"
