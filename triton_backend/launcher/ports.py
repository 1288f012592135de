"""Checks ports before a server is started: it would notice a taken one only after loading its models."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from inference_session.errors import ConfigurationError

_FREE = range(20_000, 30_000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections (32,768 to 60,999)."""
_NUM_TRIALS = 5


def resolve_ports(wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """The ports by the name of their flag, 0 resolved to a free one.

    Raises:
        ConfigurationError: one is taken, by another program or by another of these; the message names it.
    """
    with contextlib.ExitStack() as stack:  # all are held until the last one is known, so that no two are the same
        given = {flag: _listen(stack, host, port, flag) for flag, (host, port) in wanted.items() if port}
        chosen = {flag: _choose(stack, host, flag) for flag, (host, port) in wanted.items() if not port}
        return {flag: (given | chosen)[flag] for flag in wanted}


def _choose(stack: contextlib.ExitStack, host: str, flag: str) -> int:
    """A free port, if possible one that the kernel does not give to an outgoing connection.

    The server listens only after it has loaded its models. Until then any connection that some process opens may get
    a port that the kernel chose for us.
    """
    for port in random.SystemRandom().sample(_FREE, _NUM_TRIALS):
        with contextlib.suppress(ConfigurationError):
            return _listen(stack, host, port, flag)
    return _listen(stack, host, 0, flag)


def _listen(stack: contextlib.ExitStack, host: str, port: int, flag: str) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        listener = stack.enter_context(socket.socket(family, kind))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        listener.bind((address[0], port, *address[2:]))
        listener.listen()
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"port {port} of {host} cannot be used: {getattr(error, 'strerror', error)}; choose another by {flag}"
        ) from error
    return int(listener.getsockname()[1])
