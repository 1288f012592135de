"""Log records of requests and of background work, which go on where a handler of the application raises."""

from __future__ import annotations

import contextlib
import logging


def warn(log: logging.Logger, message: str, *arguments: object) -> None:
    """As `log.warning`; an error of a handler is dropped."""
    with contextlib.suppress(Exception):
        log.warning(message, *arguments, stacklevel=2)


def log_error(log: logging.Logger, message: str, *arguments: object) -> None:
    """As `log.exception`, for the error that is being handled; one of a handler is dropped."""
    with contextlib.suppress(Exception):
        # `exception` of Python 3.10 would count itself as a level, and name this function.
        log.error(message, *arguments, exc_info=True, stacklevel=2)
