"""What the options of `hotrow serve` mean together."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_backend.launcher.command import ServerOptions


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_an_address_of_this_machine_is_open_to_no_other(host: str) -> None:
    """So `hotrow serve` does not warn."""
    assert ServerOptions(Path("models"), host=host).open_to_others() == ()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "ctr.example.org"])  # noqa: S104  nothing listens
def test_other_addresses_are_open_unless_there_is_a_key(host: str) -> None:
    """HTTP may be kept apart from gRPC."""
    options = ServerOptions(Path("models"), host=host)

    assert options.open_to_others() == ("http", "grpc")
    assert ServerOptions(Path("models"), host=host, http_host="127.0.0.1").open_to_others() == ("grpc",)
    assert ServerOptions(Path("models"), host=host, restricted_key="secret").open_to_others() == ()
