"""How we use Kafka's client library."""

from __future__ import annotations

import subprocess
import sys

from tests.testing.broker import Broker

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
