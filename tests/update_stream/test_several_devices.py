"""An update stream over a store reaches the cache on each device, in order. Devices stand in for GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from inference_session import InferenceSession
from inference_session.rows.base import look_up_keys
from inference_session.update_stream import Publisher
from tests.testing.broker import Broker
from tests.testing.servers import wait_until
from tests.testing.several_devices import stand_in
from tests.testing.small_version import SmallVersion
from tests.testing.stored_model import push, url_of
from tests.testing.streamed_rows import DEFAULT, vectors


def test_updates_of_files_reach_each_device_in_order(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a store: each device ends with the last update of each row, or without the row."""
    stand_in(monkeypatch)
    keys = small.tables["hashed/key"][:8]
    with (
        InferenceSession.open(small.directory, device="cuda:0,1", shard="rows", update_stream=broker.url) as session,
        Publisher(broker.url, small.model) as publisher,
    ):
        for value in range(1, 30):
            publisher.publish("hashed", keys, vectors(value, rows=len(keys), dim=2))
        publisher.delete("hashed", keys[:2])
        publisher.flush()
        expected = np.concatenate([np.tile(np.array(DEFAULT, np.float32), (2, 1)), vectors(29, rows=6, dim=2)])
        wait_until(
            lambda: all(np.array_equal(session.lookup("hashed", keys), expected) for _ in session.rows.readers),
            "the last updates on each device",
        )


def test_updates_reach_each_cache_in_order(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that both caches hold: each device ends with the last update of each, or without the row."""
    stand_in(monkeypatch)
    url = url_of(small.directory)
    push(small.directory, url)
    settings = {"persistent_store": url, "update_stream": broker.url, "cache_bytes": 1 << 20}
    keys = small.tables["hashed/key"][:8]
    with InferenceSession.open(small.directory, device="cuda:0,1", **settings) as session:

        def answers() -> list[np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
            found = [np.empty((len(keys), 2), np.float32) for _ in session.rows.readers]
            for reader, out in zip(session.rows.readers, found, strict=True):
                look_up_keys(reader, 2, keys, out)
            return found

        answers()
        wait_until(lambda: session.stats()["cache"]["tables"]["hashed"]["rows"] >= 16, "both caches to have the rows")
        with Publisher(broker.url, small.model) as publisher:
            for value in range(1, 30):
                publisher.publish("hashed", keys, vectors(value, rows=len(keys), dim=2))
            publisher.delete("hashed", keys[:2])
        expected = np.concatenate([np.tile(np.array(DEFAULT, np.float32), (2, 1)), vectors(29, rows=6, dim=2)])
        wait_until(lambda: all(np.array_equal(each, expected) for each in answers()), "the last updates on each device")
        assert session.stats()["cache"]["tables"]["hashed"]["updates"] > 0
