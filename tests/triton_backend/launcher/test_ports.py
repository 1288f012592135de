"""Ports of a server: free, different, and none that a connection may be given meanwhile."""

from __future__ import annotations

import socket

import pytest

from inference_session.errors import ConfigurationError
from triton_backend.launcher.ports import resolve_ports

HOST = "127.0.0.1"


def test_chosen_ports_differ_and_are_not_outgoing() -> None:
    """Linux gives ports from 32,768 on to connections; the server listens on ours only when its models are loaded."""
    ports = resolve_ports({f"--{number}-port": (HOST, 0) for number in range(20)})

    assert list(ports) == [f"--{number}-port" for number in range(20)]
    assert len(set(ports.values())) == 20
    assert all(20_000 <= port < 30_000 for port in ports.values())


def test_a_given_port_is_never_chosen_for_another() -> None:
    """It stays what was asked for, wherever it is in the order."""
    given = resolve_ports({"--grpc-port": (HOST, 0)})["--grpc-port"]

    ports = resolve_ports({"--http-port": (HOST, 0), "--grpc-port": (HOST, given)})

    assert ports["--grpc-port"] == given
    assert ports["--http-port"] != given


@pytest.mark.parametrize("port", ["taken", -1, 65_536])
def test_a_port_that_cannot_be_used_is_named(port: str | int) -> None:
    """With the flag that changes it."""
    with socket.create_server((HOST, 0)) as other:
        number = other.getsockname()[1] if port == "taken" else int(port)
        with pytest.raises(ConfigurationError, match=f"port {number} of {HOST} cannot be used.*--http-port"):
            resolve_ports({"--http-port": (HOST, number)})
