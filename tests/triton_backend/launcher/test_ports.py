"""Ports of a server: free, different, and given to nobody else until the server listens."""

from __future__ import annotations

import socket

import pytest

from inference_session.errors import ConfigurationError
from triton_backend.launcher import ports
from triton_backend.launcher.ports import reserved_ports

HOST = "127.0.0.1"


def test_chosen_ports_differ_and_are_not_outgoing() -> None:
    """Linux gives ports from 32,768 on to connections; the server listens on ours only when its models are loaded."""
    with reserved_ports({f"--{number}-port": (HOST, 0) for number in range(20)}) as found:
        assert list(found) == [f"--{number}-port" for number in range(20)]
        assert len(set(found.values())) == 20
        assert all(20_000 <= port < 30_000 for port in found.values())


def test_a_chosen_port_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to another server that starts at the same time, nor to a program that asks for it without SO_REUSEADDR."""
    with reserved_ports({"--http-port": (HOST, 0)}) as first:
        [port] = first.values()
        monkeypatch.setattr(ports, "_FREE", [port])
        with reserved_ports({"--http-port": (HOST, 0)}) as second:
            assert second["--http-port"] != port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))


def test_the_server_listens_on_a_reserved_port() -> None:
    """Also a second time, while connections of the first time are still being closed."""
    with reserved_ports({"--http-port": (HOST, 0)}) as found:
        for _ in range(2):
            with (
                socket.create_server((HOST, found["--http-port"])) as server,
                socket.create_connection(server.getsockname()) as client,
            ):
                server.accept()[0].close()
                assert not client.recv(1)


def test_a_given_port_is_never_chosen_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays what was asked for, wherever it is in the order."""
    with reserved_ports({"--grpc-port": (HOST, 0)}) as found:
        given = found["--grpc-port"]
    monkeypatch.setattr(ports, "_FREE", [given])

    with reserved_ports({"--http-port": (HOST, 0), "--grpc-port": (HOST, given)}) as found:
        assert found["--grpc-port"] == given
        assert found["--http-port"] != given


def test_a_port_given_twice_is_refused() -> None:
    """The message names the second flag."""
    with reserved_ports({"--grpc-port": (HOST, 0)}) as found:
        given = found["--grpc-port"]

    with (
        pytest.raises(ConfigurationError, match=f"port {given} of {HOST} cannot be used.*--metrics-port"),
        reserved_ports({"--grpc-port": (HOST, given), "--metrics-port": (HOST, given)}),
    ):
        pass


@pytest.mark.parametrize("port", ["taken", -1, 65_536])
def test_a_port_that_cannot_be_used_is_named(port: str | int) -> None:
    """With the flag that changes it."""
    with socket.create_server((HOST, 0)) as other:
        number = other.getsockname()[1] if port == "taken" else int(port)
        with (
            pytest.raises(ConfigurationError, match=f"port {number} of {HOST} cannot be used.*--http-port"),
            reserved_ports({"--http-port": (HOST, number)}),
        ):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no name"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    """No other port would help."""
    with (
        pytest.raises(ConfigurationError, match=f"'{host}' is not an address of this machine"),
        reserved_ports({"--http-port": (host, 0)}),
    ):
        pass
