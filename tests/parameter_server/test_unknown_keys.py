"""Keys that no tier has: remembered for a moment, and never hiding a row that comes later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference_session.errors import UnavailableError
from inference_session.parameter_server import unknown_keys
from inference_session.parameter_server.base import EmbeddingStore, FetchRequest
from inference_session.parameter_server.server import ParameterServer
from inference_session.parameter_server.tier import Tier
from inference_session.parameter_server.unknown_keys import MEMORY_S, UnknownKeys
from inference_session.parameter_server.write_log import WriteLog
from tests.testing.memory_store import MemoryStore
from tests.testing.server_calls import fetch_any
from tests.testing.servers import wait_until
from tests.testing.wrapper_store import FaultStore, WrapperStore

DIMS = {"user": 2}


class RecordingStore(WrapperStore):
    """Remembers the keys that were fetched."""

    def __init__(self, store: EmbeddingStore) -> None:
        super().__init__(store)
        self.fetched: list[list[int]] = []

    def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
        self.fetched += [request.keys.tolist() for request in requests]
        return super().fetch_many(requests)


def fetch(server: ParameterServer, keys: list[int]) -> dict[int, float]:
    """What the server answers, of the keys that it finds."""
    request = FetchRequest("user", np.array(keys, np.int64), np.full((len(keys), 2), np.nan, np.float32))
    found = fetch_any(server, [request])[0]
    return dict(zip(request.keys[found].tolist(), request.out[found, 0].tolist(), strict=True))


def insert(store: EmbeddingStore | ParameterServer, key: int, value: float) -> None:
    store.insert("user", np.array([key]), np.full((1, 2), value, np.float32))


def test_unknown_keys_are_not_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no tier has is remembered until refresh(); the other keys of a request are fetched as usual."""
    monkeypatch.setattr(unknown_keys, "MEMORY_S", 1e6)
    store = RecordingStore(MemoryStore(DIMS))
    insert(store, 1, 10)
    server = ParameterServer([Tier("memory", store)])

    assert fetch(server, [1, 7]) == {1: 10}
    insert(store.store, 7, 70)
    assert fetch(server, [1, 7]) == {1: 10}
    server.refresh()

    assert fetch(server, [7]) == {7: 70}
    assert store.fetched == [[1, 7], [1], [7]]
    server.close()


def test_a_row_inserted_through_the_server_is_there_at_once() -> None:
    """insert() forgets what was unknown in its table."""
    server = ParameterServer([Tier("memory", MemoryStore(DIMS))])
    assert fetch(server, [7]) == {}

    insert(server, 7, 70)

    assert fetch(server, [7]) == {7: 70}
    server.close()


def test_a_key_asked_for_while_its_row_is_written_is_not_unknown() -> None:
    """A fetch that began before an insert ended, and found nothing, is not remembered."""

    class Writing(WrapperStore):
        def fetch_many(self, requests: Sequence[FetchRequest]) -> list[NDArray[np.bool_]]:
            found = super().fetch_many(requests)
            if not found[0].any():
                insert(server, 7, 70)
            return found

    server = ParameterServer([Tier("memory", Writing(MemoryStore(DIMS)))])
    assert fetch(server, [7]) == {}

    assert fetch(server, [7]) == {7: 70}
    server.close()


def test_keys_asked_for_in_an_outage_are_not_remembered() -> None:
    """A key that only the dead tier has is found as soon as that tier is back."""
    memory, faults = MemoryStore(DIMS), [UnavailableError("gone")]
    insert(memory, 3, 30)
    tiers = [
        Tier("upper", FaultStore(memory, lambda _: faults[0] if faults else None)),
        Tier("lower", MemoryStore(DIMS)),
    ]
    server = ParameterServer(tiers)
    assert fetch(server, [3]) == {}

    faults.clear()
    wait_until(lambda: server.stats().tiers["upper"].failure is None, "the tier to come back")

    assert fetch(server, [3]) == {3: 30}
    server.close()


@given(st.lists(st.tuples(st.floats(0, 2 * MEMORY_S), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))))
def test_the_memory_of_unknown_keys_ends(events: list[tuple[float, list[int]]]) -> None:
    """A key counts as unknown only within MEMORY_S of a time at which it was found to be."""
    now = 0.0
    unknown = UnknownKeys(WriteLog(), clock=lambda: now)
    entered: dict[int, float] = {}

    for pause, keys in events:
        now += pause
        array = np.array(keys, np.int64)
        held = unknown.holds("user", array)
        for key, holds in zip(keys, [False] * len(keys) if held is None else held.tolist(), strict=True):
            assert not holds or now < entered[key] + MEMORY_S
        unknown.add("user", array, 0, now)
        entered |= dict.fromkeys(keys, now)
