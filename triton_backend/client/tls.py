"""TLS of the server's gRPC endpoint and of its clients. Triton's HTTP and metrics endpoints have no TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_session.errors import ConfigurationError


@dataclass(frozen=True)
class ClientTls:
    """How a client authenticates the server, and itself to it. Files are PEM.

    Raises:
        ConfigurationError: a file cannot be read, is not PEM, or a key does not belong to its certificate.
    """

    ca: Path
    """Certificates of the authorities that may have signed the server's."""
    certificate: Path | None = None
    """Shown to a server that asks for one; needs `key`."""
    key: Path | None = None
    server_name: str | None = None
    """The name expected in the server's certificate. None: the host of the URL."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("a client certificate needs its key, and the key its certificate")
        _context(ssl.PROTOCOL_TLS_CLIENT, self.certificate, self.key, self.ca)

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments of `tritonclient.grpc.InferenceServerClient`."""
        return {
            "ssl": True,
            "root_certificates": str(self.ca),
            "certificate_chain": str(self.certificate) if self.certificate else None,
            "private_key": str(self.key) if self.key else None,
        }

    def channel_args(self) -> list[tuple[str, Any]]:
        """Arguments of the gRPC channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@dataclass(frozen=True)
class ServerTls:
    """The server's certificate, and which clients it accepts. Files are PEM.

    Raises:
        ConfigurationError: a file cannot be read, is not PEM, or the key does not belong to the certificate.
    """

    certificate: Path
    """The server's certificate, followed by those between it and its authority."""
    key: Path
    client_ca: Path | None = None
    """Only clients whose certificate one of these authorities has signed are accepted. None: all clients."""

    def __post_init__(self) -> None:
        _context(ssl.PROTOCOL_TLS_SERVER, self.certificate, self.key, self.client_ca)

    def flags(self) -> Iterator[str]:
        """Flags of tritonserver, which has another working directory."""
        yield "--grpc-use-ssl=true"
        yield f"--grpc-server-cert={self.certificate.absolute()}"
        yield f"--grpc-server-key={self.key.absolute()}"
        if self.client_ca is not None:
            yield "--grpc-use-ssl-mutual=true"
            yield f"--grpc-root-cert={self.client_ca.absolute()}"

    def own_client(self) -> ClientTls:
        """The launcher's own client: it trusts exactly this certificate of its server, and presents it as its own."""
        return ClientTls(self.certificate, self.certificate, self.key, server_name=self._name())

    def _name(self) -> str | None:
        """A name that the certificate is valid for, found by a handshake with ourselves; None if there is none."""
        server = _context(ssl.PROTOCOL_TLS_SERVER, self.certificate, self.key, None)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, None, None, self.certificate)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            return next(_names(_shake_hands(client, server)), None)
        except ssl.SSLError as error:  # such as one that has expired, which no client would take either
            raise ConfigurationError(f"{self.certificate}: clients would reject it: {error}") from error


def _context(protocol: int, certificate: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    for path, load in (
        (certificate, lambda path: context.load_cert_chain(path, key, password=_no_password)),
        (ca, context.load_verify_locations),
    ):
        if path is None:
            continue
        try:
            load(path)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            belongs = f" with key {str(key)!r}" if path is certificate else ""
            raise ConfigurationError(f"certificate {str(path)!r}{belongs} cannot be used: {error}") from error
    return context


def _no_password() -> str:
    """Refuse an encrypted key in place of a password prompt, which would wait without end."""
    raise ValueError("the key is encrypted; tritonserver needs an unencrypted key")


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> Mapping[str, Any]:
    """The server's certificate as the client sees it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
    return ends[0].getpeercert() or {}


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "IP Address"):
            yield name.replace("*", "hotrow")
