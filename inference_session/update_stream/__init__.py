"""Update streams: rows that change while they are served, from a trainer through Kafka to every server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_session.update_stream.publisher import Publisher

__all__ = ["Publisher"]


def __getattr__(name: str) -> Any:
    """Import what needs the package `confluent-kafka` only where it is used."""
    if name == "Publisher":
        from inference_session.update_stream.publisher import Publisher

        return Publisher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
