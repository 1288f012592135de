"""What commands that talk to a running server have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from triton_backend.remote import RemoteServer


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options `--url` and `--key-file` of a click command; it gets them as `url` and `key_file`."""
    url = click.option(
        "--url", default="localhost:8001", show_default=True, metavar="HOST:GRPC_PORT", help="The server's gRPC port."
    )
    key_file = click.option(
        "--key-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The key of a server that was started with `hotrow serve --restrict-apis`.",
    )
    return url(key_file(command))


def connect(url: str, key_file: Path | None) -> RemoteServer:
    """The server that the options name; nothing is sent yet."""
    return RemoteServer(url, restricted_key=key_file.read_text(encoding="utf-8").strip() if key_file else None)
