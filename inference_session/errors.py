"""Every error this library raises on purpose, in one short tree.

Each type also inherits the builtin that a Python user would catch. `triton_backend/backend/errors.py` maps them to
Triton's codes; nothing else translates errors.
"""

from __future__ import annotations


class HotrowError(Exception):
    """Root of all errors raised by hotrow."""

    def __str__(self) -> str:
        # KeyError, a base of some of ours, would show the repr of the message.
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigurationError(HotrowError, ValueError):
    """A setting is unknown, or its value is not allowed."""


class InvalidRequestError(HotrowError, ValueError):
    """One request is malformed: a wrong or missing input, type, shape or size. Other requests are not affected."""


class UnknownKeyError(InvalidRequestError):
    """A request holds a key that no tier has, and the model's settings reject such requests."""


class TableNotFoundError(HotrowError, KeyError):
    """No table of that name belongs to the model."""


class ModelFormatError(HotrowError, ValueError):
    """A model file or version directory is missing, damaged or not of its format; the message names the file."""


class TraceFormatError(HotrowError, ValueError):
    """A file of keys is damaged or not of its format; the message names the file."""


class UnsupportedModelError(HotrowError, ValueError):
    """The model is well-formed, but holds something that cannot be served; the message names it."""


class CanaryError(HotrowError, ValueError):
    """A version answers its canary requests with NaN or infinities, or too far from the recorded answers."""


class StoreError(HotrowError, RuntimeError):
    """A tier could not carry out an operation."""


class SourceError(HotrowError, OSError):
    """A file of a model cannot be read or written in its place (a folder or HDFS); the message names both."""


class UnavailableError(HotrowError, RuntimeError):
    """A request cannot be answered now, but may be later: a tier is down, or the queue is full."""


class SessionClosedError(HotrowError, RuntimeError):
    """The session, cache or store has been closed."""


def first_line(error: Exception) -> str:
    """The first line of a library's error, for a message of ours; some errors contain only their name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
