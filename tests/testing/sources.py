"""Writes files into a source by the source's own means."""

from __future__ import annotations

from inference_session.model_source import ModelSource

CONTENT = bytes(range(256)) * 40_000
"""More than two of the test cluster's blocks."""


def put(source: ModelSource, path: str, content: bytes) -> None:
    source.write(path, lambda begin: [content[begin:]])
