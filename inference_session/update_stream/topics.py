"""Names of a model's topics: `hps_et.<model>.<table>` for its rows, `hotrow_versions.<model>` for its versions."""

from __future__ import annotations

import re
from collections.abc import Collection

from inference_session.errors import ConfigurationError

PREFIXES = ("hps_et", "hctr_et")
"""What topics begin with: HPS's name, which we publish under, and HugeCTR's of 3.4, which we follow as well."""

_ANNOUNCEMENTS = "hotrow_versions"
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def topic_name(*parts: str) -> str:
    """The topic of these parts, such as prefix, model and table; ConfigurationError where Kafka allows no such name."""
    topic = ".".join(parts)
    if not _TOPIC.fullmatch(topic):
        raise ConfigurationError(
            f"{topic!r} is not a valid Kafka topic; allowed: up to 249 letters, digits, '.', '_' and '-'"
        )
    return topic


def table_of(topic: str, model: str) -> str | None:
    """The table whose updates a topic carries, None where it belongs to another model."""
    for prefix in PREFIXES:
        begin = f"{prefix}.{model}."
        table = topic[len(begin) :]
        if topic.startswith(begin) and table and "." not in table:
            return table
    return None


class TableTopics:
    """The topics that carry rows of these tables of a model."""

    def __init__(self, model: str, tables: Collection[str]) -> None:
        self._model, self._tables = model, tables

    def table_of(self, topic: str) -> str | None:
        """The table whose updates a topic carries; None: the model has no table of that name."""
        table = table_of(topic, self._model)
        return table if table in self._tables else None


def announcement_topic(model: str) -> str:
    """The topic of a model's versions; ConfigurationError where Kafka allows no such name."""
    return topic_name(_ANNOUNCEMENTS, model)
