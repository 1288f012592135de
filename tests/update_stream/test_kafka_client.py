"""How we use Kafka's client library."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from inference_session.errors import UnavailableError
from inference_session.session import InferenceSession
from inference_session.update_stream import announcements
from inference_session.update_stream.kafka_client import (
    KafkaError,
    KafkaException,
    TopicPartition,
    create_client,
    read_to_end,
)
from inference_session.update_stream.publisher import Publisher
from inference_session.urls.kafka_url import KafkaUrl
from tests.testing.broker import Broker
from tests.testing.certificates import new_authority
from tests.testing.servers import PATIENCE_S, encrypting, wait_until
from tests.testing.small_version import SmallVersion

ASSIGN_OFTEN = """
import sys
from inference_session.update_stream.kafka_client import Consumer, TopicPartition, assign, create_client
from inference_session.urls.kafka_url import KafkaUrl
for number in range(5):
    settings = {"group.id": "often", "auto.offset.reset": "earliest"}
    consumer = create_client(Consumer, KafkaUrl.parse(sys.argv[1]), settings)
    for turn in range(100):
        assign(consumer, [TopicPartition("often", partition, 0) for partition in range(4)])
        if turn % 7 == 0:
            consumer.consume(100, 0.02)
    consumer.close()
"""
"""Changes what is read, and closes, as fast as it can."""


def test_changes_in_quick_succession_do_not_end_the_process(broker: Broker) -> None:
    """The client library would, by a failed assertion."""
    broker.send("often", *[(b"key", b"value")] * 50)

    done = subprocess.run([sys.executable, "-c", ASSIGN_OFTEN, broker.url], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


ASK_A_SILENT_BROKER = """
import socket, sys, threading, time, traceback
from inference_session.update_stream import announcements
from inference_session.update_stream.publisher import Publisher
from tests.testing.ctrl_c import CtrlC
timeout_s = announcements.BROKER_TIMEOUT_S = float(sys.argv[2])

def waits():
    # a function without a name calls the client library
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    return any(frame.f_code.co_name == "<lambda>" for stack in stacks for frame, _ in stack)

def interrupt():
    while not waits():
        time.sleep(0.01)
    ctrl_c.press()

def ask():
    if sys.argv[1] == "publisher":
        Publisher(url, "ctr", timeout_s=timeout_s)
    else:
        with announcements.Announcements(announcements.KafkaUrl.parse(url), "ctr") as announced:
            announced.newest(0.0)

ctrl_c = CtrlC()
listener = socket.create_server(("127.0.0.1", 0))
url = f"kafka://127.0.0.1:{listener.getsockname()[1]}"
threading.Thread(target=interrupt, daemon=True).start()
try:
    ask()
except KeyboardInterrupt:
    print("waits", waits())
"""
"""Presses Ctrl-C while a client waits for an answer, and says whether the client library still waits after that."""


@pytest.mark.parametrize("kind", ["publisher", "announcements"])
def test_interrupts_are_not_held_up_by_brokers_that_do_not_answer(kind: str) -> None:
    """The client library handles no signal until its timeout."""
    command = [sys.executable, "-c", ASK_A_SILENT_BROKER, kind, str(PATIENCE_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "waits True\n", "")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("other authority", "certificate verify failed"),
        ("other name", "certificate verify failed"),
        ("no tls", "security.protocol"),
    ],
    ids=["authority", "name", "no-tls"],
)
def test_it_is_told_why_brokers_cannot_be_reached(
    case: str, reason: str, broker: Broker, small: SmallVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library itself raises no more than `Broker transport failure`."""
    monkeypatch.setattr(announcements, "BROKER_TIMEOUT_S", 2.0)
    authority, other = (new_authority(small.directory.parent / name) for name in ("authority", "other"))
    certificate = authority.issue("broker.internal" if case == "other name" else "127.0.0.1")
    trusted = other.file if case == "other authority" else authority.file
    options = "" if case == "no tls" else f"?security_protocol=ssl&tls_ca_certificate={trusted}"
    expected = f"no (Kafka )?broker answers.*{reason}"
    with encrypting(broker.port, certificate.file, certificate.key) as port:
        url = f"kafka://127.0.0.1:{port}{options}"
        with pytest.raises(UnavailableError, match=expected):
            Publisher(url, small.model, timeout_s=2)
        with (
            announcements.Announcements(KafkaUrl.parse(url), small.model) as announced,
            pytest.raises(UnavailableError, match=expected),
        ):
            announced.newest(0)
        with InferenceSession.open(small.directory, update_stream=url) as session:
            wait_until(lambda: bool(re.search(expected, str(session.stats()["updates"]["failure"]))), "the reason")


def test_a_client_that_cannot_start_its_threads_may_be_tried_again() -> None:
    """The error does not speak of the settings, which are right."""

    def start(_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "Failed to create thread"))

    with pytest.raises(UnavailableError, match="does not start; try again: Failed to create thread"):
        create_client(start, KafkaUrl.parse("kafka://127.0.0.1:1"))


def test_errors_of_the_group_alone_do_not_keep_a_reader_waiting() -> None:
    """The client library reports them again and again, where an access list refuses the group for instance."""
    event = SimpleNamespace(error=lambda: KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED), topic=lambda: None)
    events = iter([[event]] * 1000)
    consumer: Any = SimpleNamespace(
        assignment=list, assign=lambda _: None, list_topics=lambda *_, **__: None, consume=lambda *_: next(events)
    )

    with pytest.raises(UnavailableError, match=r"topic 't' at .* cannot be read: its next message did not come within"):
        list(read_to_end(consumer, KafkaUrl.parse("kafka://127.0.0.1:1"), TopicPartition("t", 0, 0), 0.0))
