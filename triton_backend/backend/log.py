"""Logs of a backend process go to the server's output, in the server's format: with the time and the model.

They do not use Triton's logger: a call to it from one of our threads never returns once the server is gone.
"""

from __future__ import annotations

import logging
import os
import sys

VERBOSE_VARIABLE = "HOTROW_VERBOSE"
"""Environment variable that makes backend processes log more than warnings and errors; any value."""
_PACKAGES = ("inference_session", "triton_backend")
_LINE = '{levelname[0]}{asctime} {process} {filename}:{lineno}] "{model} version {version}: {message}"'


class _Lines(logging.Formatter):
    default_time_format = "%m%d %H:%M:%S"
    default_msec_format = "%s.%03d"


def show_log(model: str, version: str) -> None:
    """Show on stderr what our packages log from now on, marked with this model and version."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(_LINE, style="{", defaults={"model": model, "version": version}))
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if os.environ.get(VERBOSE_VARIABLE) else logging.WARNING)
