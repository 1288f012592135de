"""Extracts the reason why a model did not load from Triton's message."""

from __future__ import annotations

import re

_LOAD_FAILED = re.compile(r"^load failed for model '.*?': ")
_VERSION_FAILED = re.compile(r"version (\d+) is at \w+ state: ")
_STUB_DIED = re.compile(r"Stub process '.*?' is not healthy\.?")


def plain_reason(message: str) -> str:
    """The reason alone, as one line, without the place in our code that the Python backend may add."""
    text = re.sub(r"\n\nAt:\n(?:  .*\n?)*", "", _LOAD_FAILED.sub("", message))
    text = _VERSION_FAILED.sub(r"version \1: ", text)
    text = text.replace("Internal: ", "").replace("TritonModelException: ", "")
    text = _STUB_DIED.sub("its backend process is dead or hung", text)
    return " ".join(text.replace("\0", "").split()).rstrip(";")
