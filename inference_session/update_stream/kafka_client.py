"""Kafka's client library, librdkafka: all that is used of it, and clients made of a URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from inference_session.errors import ConfigurationError
from inference_session.update_stream.kafka_url import KafkaUrl

try:
    from confluent_kafka import (
        OFFSET_BEGINNING,
        Consumer,
        KafkaError,
        KafkaException,
        Message,
        Producer,
        TopicPartition,
    )
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic
except ImportError as missing:
    raise ConfigurationError("Kafka needs the package `confluent-kafka`: pip install 'hotrow[kafka]'") from missing

__all__ = [
    "OFFSET_BEGINNING",
    "AdminClient",
    "Consumer",
    "KafkaError",
    "KafkaException",
    "Message",
    "NewTopic",
    "Producer",
    "TopicPartition",
    "create_client",
]

Client = TypeVar("Client")


def create_client(
    kind: Callable[[dict[str, Any]], Client], url: KafkaUrl, settings: Mapping[str, Any] | None = None
) -> Client:
    """A `Consumer`, `Producer` or `AdminClient` of the brokers, which prints nothing.

    Raises:
        ConfigurationError: the library does not take an option of the URL.
    """
    quiet = {"log_level": 0, "error_cb": lambda _: None}  # what matters is raised
    try:
        return kind({**url.client_settings(), **quiet, **(settings or {})})
    except KafkaException as error:
        raise ConfigurationError(f"settings of {str(url)!r} are refused: {error.args[0].str()}") from error
