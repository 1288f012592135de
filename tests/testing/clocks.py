"""What a time of day that is set back does to Kafka's client library."""

from __future__ import annotations

import threading

import confluent_kafka


class ConsumerWhileSetBack:
    """A client library's consumer while the time of day was set back: it waits for an hour, or for all it may return.

    The hour lasts until the test ends.
    """

    def __init__(self, consumer: confluent_kafka.Consumer, is_over: threading.Event) -> None:
        self._consumer, self._is_over = consumer, is_over

    def __getattr__(self, name: str) -> object:
        return getattr(self._consumer, name)

    def consume(self, num_messages: int, timeout: float) -> list[confluent_kafka.Message]:
        """Messages that have arrived; with a timeout, as many as are wanted."""
        messages = self._consumer.consume(num_messages, 0.0)
        while timeout and len(messages) < num_messages and not self._is_over.wait(0.01):
            messages += self._consumer.consume(num_messages - len(messages), 0.0)
        return messages
