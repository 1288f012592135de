"""Converts our errors to Triton's: the only place that assigns their codes."""

from __future__ import annotations

import traceback
from typing import Any

import triton_python_backend_utils as pb_utils

from inference_session.errors import HotrowError, InvalidRequestError, SessionClosedError, UnavailableError
from inference_session.platform.file_names import decoded

_CODES: tuple[tuple[type[HotrowError], str], ...] = (
    (InvalidRequestError, "INVALID_ARG"),
    (UnavailableError, "UNAVAILABLE"),
    (SessionClosedError, "UNAVAILABLE"),
    (HotrowError, "INTERNAL"),
)
"""By name: `pb_utils.TritonError` does not exist yet while the stub imports us."""


def triton_error(error: Exception) -> Any:
    """A `pb_utils.TritonError`: the message for the client, with the code of the error's type.

    If we did not raise the error on purpose, the client gets only its type; the rest goes to the server's log.
    """
    for kind, code in _CODES:
        if isinstance(error, kind):
            return pb_utils.TritonError(decoded(error), getattr(pb_utils.TritonError, code))
    message = f"internal error ({type(error).__name__}); see the server's log"
    return pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL)


def load_error(error: Exception) -> Exception:
    """What `initialize` raises, so that the caller of the load reads only the reason.

    The Python backend appends the place in our code to the message, and hands it on as a C string: the zero byte ends
    it before that. An error that we did not raise on purpose leaves its traceback in the server's log.
    """
    if isinstance(error, OSError) and error.filename:
        error = HotrowError(f"{error.filename}: {error.strerror}")
    elif not isinstance(error, HotrowError):
        pb_utils.Logger.log_error(decoded("".join(traceback.format_exception(error))))
        error = HotrowError(f"{type(error).__name__}: {error}")
    refusal: Exception = pb_utils.TritonModelException(decoded(f"{error}\0"))
    return refusal
