"""Batches are given to the devices of a session: to the one with the fewest under way, in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference_session.device.host import HOST, HostDevice
from inference_session.errors import SessionClosedError, UnavailableError
from inference_session.execution.replicas import DeviceThread, Replica, Replicas
from tests.testing.servers import PATIENCE_S

NO_NETWORK: Any = None


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    """Two, each with a thread."""
    made = Replicas([Replica(NO_NETWORK, NO_NETWORK, DeviceThread(HOST, is_own=True)) for _ in range(2)])
    yield made
    made.close()


def test_one_after_the_other_they_take_turns(replicas: Replicas) -> None:
    """Each in its own thread, always the same."""
    threads = [replicas.run(lambda replica: (replica, threading.get_ident())) for _ in range(6)]
    assert [replica for replica, _ in threads] == [*replicas.all] * 3
    assert len({ident for _, ident in threads}) == 2
    assert threads[:2] == threads[4:]


def test_work_that_did_nothing_keeps_the_turn(replicas: Replicas) -> None:
    """What comes instead of it is done by the same device; then it is the other's turn."""
    seen: list[Replica] = []
    for _ in range(4):
        replicas.run(seen.append)
        seen.append(replicas.run(lambda replica: replica))
    assert seen == [each for each in (*replicas.all, *replicas.all) for _ in range(2)]


def test_two_at_once_are_on_both(replicas: Replicas) -> None:
    """Neither ends before the other has begun; a third one waits for the first that ends."""
    met = threading.Barrier(2, timeout=PATIENCE_S)

    def meet(replica: Replica) -> Replica:
        met.wait()
        return replica

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: replicas.run(meet), range(2)))
    assert {id(replica) for replica in found} == {id(replica) for replica in replicas.all}
    assert [replica.num_under_way for replica in replicas.all] == [0, 0]


def test_errors_are_those_of_the_work(replicas: Replicas) -> None:
    """And the device is free again after them."""
    with pytest.raises(ZeroDivisionError):
        replicas.run(lambda _: 1 // 0)
    assert [replica.num_under_way for replica in replicas.all] == [0, 0]


def test_closed_replicas_do_nothing(replicas: Replicas) -> None:
    """Callers get an error that says that the session is closed."""
    replicas.close()
    with pytest.raises(SessionClosedError):
        replicas.run(lambda _: None)


def test_a_failed_device_stops_all_of_them() -> None:
    """Work is refused with that device's reason, on whichever device it would have been."""

    class FailedDevice(HostDevice):
        failure = "cuda:1 has failed"

    devices = [HostDevice(), FailedDevice()]
    made = Replicas([Replica(NO_NETWORK, NO_NETWORK, DeviceThread(device, is_own=True)) for device in devices])
    assert made.failure == "cuda:1 has failed"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cuda:1 has failed"):
            made.run(lambda _: None)
    made.close()


def test_one_replica_works_in_the_thread_of_the_caller() -> None:
    """With one device nothing is handed to another thread."""
    only = Replicas([Replica(NO_NETWORK, NO_NETWORK, DeviceThread(HOST, is_own=False))])
    assert only.run(lambda _: threading.get_ident()) == threading.get_ident()
