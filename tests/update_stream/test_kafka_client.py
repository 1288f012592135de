"""How we use Kafka's client library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.testing.broker import Broker
from tests.testing.servers import PATIENCE_S

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
