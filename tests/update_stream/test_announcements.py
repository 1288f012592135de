"""Which version has been announced last, by the topic of a real broker."""

from __future__ import annotations

import contextlib
import threading

import confluent_kafka
import pytest

from inference_session.errors import UnavailableError
from inference_session.update_stream import Publisher
from inference_session.update_stream import announcements as announcements_module
from inference_session.update_stream.announcements import Announcements
from inference_session.update_stream.kafka_client import create_client
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.broker import Broker
from tests.testing.clocks import ConsumerWhileSetBack
from tests.testing.servers import wait_until
from tests.testing.small_version import SmallVersion
from tests.testing.streamed_rows import FIRST_THAT_ABORTS


def follow(broker: Broker, small: SmallVersion) -> Announcements:
    return Announcements(KafkaUrl.parse(broker.url), small.model)


def announce(broker: Broker, small: SmallVersion, *versions: int) -> None:
    with Publisher(broker.url, small.model) as publisher:
        for version in versions:
            publisher.announce(version)


def await_version(announcements: Announcements, version: int) -> None:
    def is_announced() -> bool:
        try:
            return announcements.newest(0.1) == version
        except UnavailableError:  # the broker is away
            return False

    wait_until(is_announced, f"version {version} to be announced")


def test_the_last_announcement_counts_and_is_told_once(broker: Broker, small: SmallVersion) -> None:
    """Also an earlier one; a later one is reported when it comes, even if it is the same number."""
    with follow(broker, small) as announcements:
        assert announcements.newest(0.1) is None
        announce(broker, small, 5, 7)
        await_version(announcements, 7)
        assert announcements.newest(0.1) is None
        announce(broker, small, 7)
        await_version(announcements, 7)
        with follow(broker, small) as later:
            assert later.newest(0.1) == 7


def test_a_clock_that_is_set_back_delays_nothing(
    broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing new is found at once, and what is announced then is found."""
    create, is_over = create_client, threading.Event()
    monkeypatch.setattr(
        announcements_module, "create_client", lambda *args: ConsumerWhileSetBack(create(*args), is_over)
    )
    with contextlib.ExitStack() as ending, follow(broker, small) as announcements:
        ending.callback(is_over.set)
        announce(broker, small, 5)
        await_version(announcements, 5)
        assert announcements.newest(0.1) is None
        announce(broker, small, 6)
        await_version(announcements, 6)


@pytest.mark.parametrize("num_refused", [1, 5, 40])
def test_refused_announcements_hide_none(
    broker: Broker, small: SmallVersion, num_refused: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However many came last; the last of them is logged, once."""
    announce(broker, small, 3, 7)
    refused = [b"seven", b"", b"-1", b"0", b"9" * 40, b"\xd9\xa7", None, b"\xff"]
    messages = [(b"version", refused[i % len(refused)]) for i in range(num_refused)]
    broker.send(f"hotrow_versions.{small.model}", *messages)
    with follow(broker, small) as announcements:
        assert announcements.newest(0.1) == 7
        assert announcements.newest(0.1) is None
        announce(broker, small, 8)
        await_version(announcements, 8)
    told = [record.getMessage() for record in caplog.records if "is rejected" in record.getMessage()]
    assert len(told) == 1
    assert f"offset {num_refused + 1} of topic 'hotrow_versions.{small.model}'" in told[0]


def test_nothing_but_refused_announcements_is_none(broker: Broker, small: SmallVersion) -> None:
    """Until there is one."""
    broker.send(f"hotrow_versions.{small.model}", (b"version", b"seven"))
    with follow(broker, small) as announcements:
        assert announcements.newest(0.1) is None
        announce(broker, small, 2)
        await_version(announcements, 2)


def test_a_broker_that_comes_back_empty_hides_no_announcement(small: SmallVersion) -> None:
    """Although the new announcement has the offset of the old one."""
    with Broker() as broker, follow(broker, small) as announcements:
        announce(broker, small, 4)
        await_version(announcements, 4)
        broker.stop()
        broker.start()
        announce(broker, small, 5)
        await_version(announcements, 5)
        assert announcements.newest(0.1) is None


@pytest.mark.skipif(
    confluent_kafka.libversion()[1] >= FIRST_THAT_ABORTS,
    reason="this librdkafka aborts the process on what the broker of these tests says of a deleted topic",
)
def test_a_topic_made_anew_hides_no_announcement(broker: Broker, small: SmallVersion) -> None:
    """While the topic is gone nothing is announced."""
    with follow(broker, small) as announcements:
        announce(broker, small, 4)
        await_version(announcements, 4)
        broker.delete_topic(f"hotrow_versions.{small.model}")
        assert announcements.newest(0.1) is None
        announce(broker, small, 5)
        await_version(announcements, 5)


def test_brokers_that_do_not_answer_are_an_error(small: SmallVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which names them."""
    monkeypatch.setattr("inference_session.update_stream.announcements.BROKER_TIMEOUT_S", 1.0)
    broker = Broker()
    with follow(broker, small) as announcements, pytest.raises(UnavailableError, match=str(broker.port)):
        announcements.newest(0.1)
