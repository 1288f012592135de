"""Where a server listens. Its ports are reserved first: it would notice a taken one only after loading its models."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import random
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from inference_session.errors import ConfigurationError
from triton_backend.client.probe import SERVE_FOLDER_PREFIX

_FREE = range(20_000, 30_000)
"""Where free ports are looked for: below those that Linux gives to outgoing connections (32,768 to 60,999)."""
_NUM_TRIALS = 5
_PORTS_FILE = "ports.json"
"""In the folder of a server: where its clients reach it."""


def authority(host: str, port: int) -> str:
    """A host and a port as URLs have them; RFC 3986 calls that the authority."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Where this machine reaches what listens on a host: nobody connects to an address that means all of them."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def write_served_ports(folder: Path, ports: Collection[int]) -> None:
    """Leave a server's ports in its folder, for `served_ports`."""
    (folder / _PORTS_FILE).write_text(json.dumps(list(ports)), encoding="ascii")


def served_ports() -> set[int]:
    """The ports of the `hotrow serve`s that this user runs. Their servers work in the folders that have them."""
    found: set[int] = set()
    for working in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # of another user, gone, or not ours
            folder = working.readlink()
            if folder.name.startswith(SERVE_FOLDER_PREFIX):
                found.update(json.loads((folder / _PORTS_FILE).read_text(encoding="ascii")))
    return found


def is_of_this_machine(host: str) -> bool:
    """Whether an address is one that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def reserved_ports(wanted: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, int]]:
    """The ports by the name of their flag, 0 resolved to a free one. Nobody else is given them until the context ends.

    A socket is bound to each port, but does not listen. So a server that names the port and sets SO_REUSEADDR, as
    servers do, can listen there, also after a restart. The kernel and other callers of this function choose other
    ports.

    Raises:
        ConfigurationError: one is taken, by another program or by another of these, or a host is not this machine; the
            message names it.
    """
    with contextlib.ExitStack() as listeners:  # all listen until the last one is known, so that no two are the same
        given = {flag: _listen(listeners, host, port, flag) for flag, (host, port) in wanted.items() if port}
        chosen = {flag: _choose(listeners, host, flag) for flag, (host, port) in wanted.items() if not port}
        ports = {flag: (given | chosen)[flag] for flag in wanted}
    with contextlib.ExitStack() as holders:
        for flag, port in ports.items():
            holders.enter_context(_bound(wanted[flag][0], port, flag))
        yield ports


def _choose(listeners: contextlib.ExitStack, host: str, flag: str) -> int:
    """A free port, if possible one that the kernel does not give to an outgoing connection."""
    for port in random.SystemRandom().sample(_FREE, min(_NUM_TRIALS, len(_FREE))):
        with contextlib.suppress(ConfigurationError):
            _bound(host, port, flag, shared=False).close()  # nobody has reserved it
            return _listen(listeners, host, port, flag)
    return _listen(listeners, host, 0, flag)


def _listen(listeners: contextlib.ExitStack, host: str, port: int, flag: str) -> int:
    listener = listeners.enter_context(_bound(host, port, flag))
    try:
        listener.listen()
    except OSError as error:
        raise _unusable(host, port, flag, error) from error
    return int(listener.getsockname()[1])


def _bound(host: str, port: int, flag: str, *, shared: bool = True) -> socket.socket:
    """A socket bound to a port; `shared`: others that do not listen may be bound to it, too."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as failed:
            bound = failed.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(shared))
            bound.bind((address[0], port, *address[2:]))
            failed.pop_all()
            return bound
    except (OSError, OverflowError) as error:
        raise _unusable(host, port, flag, error) from error


def _unusable(host: str, port: int, flag: str, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", error)
    if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
        return ConfigurationError(f"{host!r} is not an address of this machine: {reason}; choose another by --host")
    return ConfigurationError(f"port {port} of {host} cannot be used: {reason}; choose another by {flag}")
