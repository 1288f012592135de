"""Options shared by commands that talk to a running server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hotrow.options.types import FILE
from inference_session.errors import ConfigurationError
from triton_backend.client.server import RemoteServer
from triton_backend.client.tls import ClientTls

_MAX_KEY_BYTES = 4096
"""A key is sent with each call; a device could be read without end."""


@dataclass(frozen=True)
class ServerAddress:
    """A server's address and credentials."""

    url: str
    key_file: Path | None = None
    tls: ClientTls | None = None

    def connect(self) -> RemoteServer:
        """The server's client; sends nothing yet."""
        key = read_key(self.key_file) if self.key_file else None
        return RemoteServer(self.url, restricted_key=key, tls=self.tls)


def read_key(path: Path) -> str:
    """The key of restricted APIs in a file; ConfigurationError where the file holds no key."""
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_KEY_BYTES + 1).decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not 0 < len(key) <= _MAX_KEY_BYTES or any(c in key for c in " =:,"):
        raise ConfigurationError(
            f"{path}: a key is one word of at most {_MAX_KEY_BYTES} ASCII characters other than space, '=', ':' and ','"
        )
    return key


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a click command that select the server; the command gets them as `address`."""
    url = click.option(
        "--url", default="localhost:8001", show_default=True, metavar="HOST:GRPC_PORT", help="The server's gRPC port."
    )
    return url(access_options(command))


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `server_options`, for a command with its own `--url`; `address` is None if the URL is None."""

    @functools.wraps(command)
    def with_address(
        *arguments: Any,
        url: str | None,
        key_file: Path | None,
        tls_ca: Path | None,
        tls_certificate: Path | None,
        tls_key: Path | None,
        **options: Any,
    ) -> Any:
        tls = client_tls(tls_ca, tls_certificate, tls_key)
        return command(*arguments, address=None if url is None else ServerAddress(url, key_file, tls), **options)

    decorated: Callable[..., Any] = with_address
    for option in (
        click.option("--tls-key", type=FILE, help="The key of --tls-certificate."),
        click.option(
            "--tls-certificate", type=FILE, help=("The client's certificate, for a server that requires one.")
        ),
        click.option("--tls-ca", type=FILE, help="Use TLS, and accept server certificates of this authority."),
        click.option("--key-file", type=FILE, help="The key of a server started with `hotrow serve --restrict-apis`."),
    ):
        decorated = option(decorated)
    return decorated


def client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls | None:
    """The client's side of TLS by the values of the options; ConfigurationError where they do not fit together."""
    if ca is not None:
        return ClientTls(ca, certificate, key)
    if certificate or key:
        raise ConfigurationError(
            "--tls-certificate and --tls-key need --tls-ca, the authority that signed the server's certificate"
        )
    return None
