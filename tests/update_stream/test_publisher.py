"""The messages of `hotrow publish` and the Publisher, read back from a real broker."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_session.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelFormatError,
    StoreError,
    UnavailableError,
)
from inference_session.model_spec import TABLES_FOLDER
from inference_session.update_stream import Publisher
from inference_session.update_stream.announcements import Announcements
from inference_session.update_stream.encodings import HEADER_BYTES, Updates, decode
from inference_session.urls.kafka_url import KafkaUrl
from inference_session.version_directory import manifest
from inference_session.version_directory.session_file import read_spec, write_spec
from tests.testing import small_model
from tests.testing.broker import Broker
from tests.testing.command_line import hotrow
from tests.testing.small_version import SmallVersion


def published(broker: Broker, topic: str, dim: int) -> Updates:
    """The rows of a topic, as a server reads them."""
    return decode([(message.key(), message.value()) for message in broker.messages(topic)], dim)


def rows_of(updates: Updates) -> dict[int, list[float]]:
    return dict(zip(updates.keys.tolist(), updates.vectors.tolist(), strict=True))


def as_rows(keys: NDArray[np.int64], vectors: NDArray[np.floating]) -> dict[int, list[float]]:
    return dict(zip(keys.tolist(), vectors.astype(np.float32).tolist(), strict=True))


@pytest.mark.parametrize("encoding", ["row", "batch"])
def test_a_version_is_published_whole(broker: Broker, small: SmallVersion, encoding: str) -> None:
    """Every table, keys stored or row numbers, vectors of any type as float32."""
    output = hotrow("publish", small.directory, "--to", broker.url, "--model", small.model, "--encoding", encoding)

    assert "120 rows confirmed" in output
    for table, dim in (("user_weight", 4), ("code", 3), ("hashed", 2)):
        keys = small.tables["hashed/key"] if table == "hashed" else np.arange(len(small.tables[table]))
        assert rows_of(published(broker, small.topic(table), dim)) == as_rows(keys, small.tables[table])


def test_the_length_of_a_batch_tells_the_width_of_its_keys(broker: Broker, small: SmallVersion) -> None:
    """Three rows of one element with keys of 4 bytes would be as long as two with keys of 8."""
    for num_rows in (2, 12, 33):
        table, keys, vectors = f"of_{num_rows}", np.arange(num_rows)[::-1], np.full((num_rows, 1), 1e20, np.float32)
        with Publisher(broker.url, small.model, encoding="batch") as publisher:
            publisher.publish(table, keys, vectors)

        topic = small.topic(table)
        assert rows_of(published(broker, topic, 1)) == as_rows(keys, vectors)
        assert all((len(message.value()) - HEADER_BYTES) % 8 for message in broker.messages(topic))


def test_a_table_folder_is_published(broker: Broker, small: SmallVersion, tmp_path: Path) -> None:
    """A bare folder of HugeCTR's two files, under the name given; one without keys is refused."""
    folder = tmp_path / "dumped"
    folder.mkdir()
    for name in ("key", "emb_vector"):
        shutil.copy(small.directory / TABLES_FOLDER / "hashed" / name, folder)
    hotrow("publish", folder, "--to", broker.url, "--model", small.model, "--table", "my.table")

    found = published(broker, small.topic("my_table"), 2)
    assert rows_of(found) == as_rows(small.tables["hashed/key"], small.tables["hashed"])
    assert sorted(path.name for path in folder.iterdir()) == ["emb_vector", "key"]
    (folder / "key").unlink()
    with pytest.raises(ConfigurationError, match="publish a version directory, or a folder with the files"):
        hotrow("publish", folder, "--to", broker.url, "--model", small.model, "--table", "t")


def test_a_table_of_a_version_goes_by_its_folder(broker: Broker, small: SmallVersion, tmp_path: Path) -> None:
    """If another table's folder has the name that this table's would have, session.json decides."""
    version = tmp_path / "version"
    shutil.copytree(small.directory, version)
    spec = read_spec(version)
    tables = [replace(table, name="user weight") if table.folder == "hashed" else table for table in spec.tables]
    write_spec(replace(spec, tables=tuple(tables)), version)

    source = version / TABLES_FOLDER / "hashed"
    hotrow("publish", source, "--to", broker.url, "--model", small.model, "--table", "user weight")

    found = published(broker, small.topic("hashed"), 2)
    assert rows_of(found) == as_rows(small.tables["hashed/key"], small.tables["hashed"])


@pytest.mark.parametrize("damaged", ["new", "old"])
def test_a_damaged_version_is_not_published(damaged: str, broker: Broker, small: SmallVersion, tmp_path: Path) -> None:
    """Nor is a version compared with it: servers would apply rows that no training wrote."""
    copy = shutil.copytree(small.directory, tmp_path / "ctr" / "2")
    path = copy / "tables" / "hashed" / "emb_vector"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    new, old = (copy, small.directory) if damaged == "new" else (small.directory, copy)

    with pytest.raises(ModelFormatError, match="hashed/emb_vector: damaged"):
        hotrow("publish", new, "--since", old, "--to", broker.url, "--model", small.model)


def test_only_what_differs_is_published(broker: Broker, small: SmallVersion, tmp_path: Path) -> None:
    """Changed and new rows, and deletions of those that are gone; nothing of tables that are equal."""
    newer = tmp_path / "newer"
    small_model.write(newer)
    folder = newer / TABLES_FOLDER / "hashed"
    keys, vectors = small.tables["hashed/key"].copy(), small.tables["hashed"].copy()
    gone = keys[7]
    keys[7], vectors[3] = 123_456_789, [9, -9]
    keys.tofile(folder / "key")
    vectors.tofile(folder / "emb_vector")
    manifest.write_manifest(newer)

    output = hotrow("publish", newer, "--since", small.directory, "--to", broker.url, "--model", small.model)

    assert "hashed: 2 rows published, 1 deleted" in output
    assert "user_weight: 0 rows published, 0 deleted" in output
    found = published(broker, small.topic("hashed"), 2)
    assert rows_of(found) == {int(keys[3]): [9, -9], 123_456_789: vectors[7].tolist()}
    assert found.deleted.tolist() == [gone]


def test_a_silent_or_absent_broker_is_an_error(small: SmallVersion) -> None:
    """The error names it in time, whether it does not listen or does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnavailableError, match=f"no Kafka broker answers at 127.0.0.1:{port} within 1 s"):
            Publisher(f"kafka://127.0.0.1:{port}", small.model, timeout_s=1)
    with pytest.raises(UnavailableError, match=f"no Kafka broker answers at 127.0.0.1:{port}"):
        Publisher(f"kafka://127.0.0.1:{port}", small.model, timeout_s=1)


@pytest.mark.parametrize("kind", [Publisher, Announcements])
def test_an_option_with_an_impossible_value_is_refused(kind: Callable[[KafkaUrl, str], object]) -> None:
    """By its value, and before anything is sent."""
    with pytest.raises(ConfigurationError, match=r"rejects the settings of .*bogus"):
        kind(KafkaUrl.parse("kafka://127.0.0.1:9?security_protocol=bogus"), "ctr")


def test_a_broker_that_dies_is_no_silent_loss(small: SmallVersion) -> None:
    """Rows that it has not confirmed are an error, at the latest when the publisher is closed."""
    # Time enough for a busy machine to confirm the first row; the second is waited for as long.
    with Broker() as broker, Publisher(broker.url, small.model, timeout_s=6) as publisher:
        publisher.publish("hashed", [1], np.zeros((1, 2)))
        publisher.flush()
        broker.stop()
        publisher.publish("hashed", [2], np.zeros((1, 2)))
        with pytest.raises((UnavailableError, StoreError), match="was not delivered"):
            publisher.flush()


def test_what_is_no_rows_is_refused(broker: Broker, small: SmallVersion) -> None:
    """Before anything is sent."""
    with Publisher(broker.url, small.model) as publisher:
        with pytest.raises(InvalidRequestError, match="keys are float64"):
            publisher.publish("hashed", [0.5], np.zeros((1, 2)))
        with pytest.raises(InvalidRequestError, match=r"found int64 \[1\] and float32 \[2, 2\]"):
            publisher.publish("hashed", [1], np.zeros((2, 2)))
        with pytest.raises(InvalidRequestError, match="the name of a table is empty"):
            publisher.publish("", [1], np.zeros((1, 2)))
    with pytest.raises(ConfigurationError, match="the name of the model is ''"):
        Publisher(broker.url, "")
    with pytest.raises(ConfigurationError, match="unknown encoding 'csv'; allowed: row, batch"):
        Publisher(broker.url, small.model, encoding="csv")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs --table"):
        hotrow("publish", small.directory.parent, "--to", broker.url, "--model", "m")


def test_brokers_that_have_lost_everything_are_an_error_of_ours(small: SmallVersion) -> None:
    """The client library gives up permanently; the publisher reports that once, and then works again."""
    rows = np.array([1, 2, 3]), np.ones((3, 2))
    with Broker() as broker, Publisher(broker.url, small.model) as publisher:
        for _ in range(2):  # messages that have predecessors
            publisher.publish("hashed", *rows)
            publisher.flush()
        broker.stop()
        broker.start()

        def publish() -> None:
            for _ in range(20):
                publisher.publish("hashed", *rows)
                publisher.flush()

        with pytest.raises((UnavailableError, StoreError), match="was not delivered"):
            publish()
        publisher.publish("hashed", *rows)
        publisher.flush()
        assert rows_of(published(broker, small.topic("hashed"), 2)) == as_rows(*rows)
