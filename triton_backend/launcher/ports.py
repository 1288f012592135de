"""Checks ports before a server is started: it would notice a taken one only after loading its models."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from inference_session.errors import ConfigurationError


def resolve_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """The ports by the name of their flag, 0 resolved to a free one.

    Raises:
        ConfigurationError: one is taken, by another program or by another of these; the message names it.
    """
    with contextlib.ExitStack() as stack:  # all are held until the last one is known, so that no two are the same
        return {flag: _listen(stack, host, port, flag) for flag, (host, port) in wanted.items()}


def _listen(stack: contextlib.ExitStack, host: str, port: int, flag: str) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = stack.enter_context(socket.socket(family, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        listener.bind(address)
        listener.listen()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"port {port} of {host} cannot be used: {getattr(error, 'strerror', error)}; choose another by {flag}"
        ) from error
    return int(listener.getsockname()[1])
