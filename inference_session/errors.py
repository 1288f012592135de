"""Every error this library raises on purpose, in one short tree.

Each type also inherits the builtin that a Python user would catch. `triton_backend/backend/errors.py` maps them to
Triton's codes; nothing else translates errors.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from typing import TypeVar


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


_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """The error, to be kept or returned: it no longer leads to the frames that it passed.

    These lead to what they worked with, such as a RocksDB that the store has replaced: it would stay open for as long
    as the error is kept. If one of them, or of their callers, leads to the error, that is until garbage is collected.
    """
    seen: set[int] = set()  # a caller may have raised an error from itself
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found.__traceback__, cause = None, found.__cause__ or found.__context__
        found.__cause__ = found.__context__ = None
        found = cause
    return error


def fresh(error: _Error) -> _Error:
    """A copy of an error that a variable holds, to be raised in its place: the frames that it passes lead to the
    variable, but not to the copy.
    """
    return copy.copy(without_frames(error))


def as_thrown(error: _Error) -> _Error:
    """The error that a `with` block has thrown into the generator of its context manager, to be the cause of another.

    From Python 3.12 on, contextlib leaves the generator's frame in its traceback, and that frame leads to the error: it
    and what the block's frames hold, such as the lock of a RocksDB, would stay until garbage is collected.
    """
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        found = found.tb_next
    return error.with_traceback(found)


def first_line(error: Exception) -> str:
    """The first line of a library's error, for a message of ours; some errors contain only their name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
