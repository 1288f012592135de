"""A real tritonserver, started by `hotrow serve` as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.certificates import Authority, new_authority
from tests.testing.served import Serve, Served, start
from tests.testing.shared_servers import until_last_test
from tests.testing.triton_models import write_bags, write_ctr, write_flat, write_scalar, write_types


@pytest.fixture
def serve(tritonserver: None) -> Iterator[Serve]:
    """Starts servers of the test's own, and stops those that still run."""
    started: list[Served] = []

    def serve(repository: Path | str, *flags: str) -> Served:
        started.append(start(repository, *flags))
        return started[-1]

    yield serve
    for served in started:
        served.close()


@pytest.fixture(scope="session")
def served(tritonserver: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that do no more than ask it."""
    repository = tmp_path_factory.mktemp("repository")
    write_ctr(repository / "ctr" / "1")
    write_flat(repository / "flat" / "1")
    write_bags(repository / "bags" / "1")
    write_types(repository / "types" / "1", strings=False)
    write_scalar(repository / "scalar" / "1")
    with until_last_test("served") as servers:
        served = start(repository)
        servers.callback(_stop, served)
        yield served


def _stop(served: Served) -> None:
    status = served.stop()
    served.close()
    assert status == 0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The one that servers' and clients' certificates come from."""
    return new_authority(tmp_path / "authority")
