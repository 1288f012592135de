"""Names of files in a process that decodes ASCII names only, as Triton's Python processes do.

Python gives them half characters in place of other bytes, which Python's own calls take, and no library does.
"""

from __future__ import annotations

import os

from inference_session.errors import ConfigurationError


def decoded(text: object) -> str:
    """A path, or a text with paths in it, with their names in UTF-8."""
    return str(text).encode(errors="surrogateescape").decode(errors="replace")


def as_file_name(text: str) -> str:
    """A path out of a text, as of a setting, as this process's own paths are: its calls refuse other characters."""
    return os.fsdecode(text.encode(errors="surrogateescape"))


def path_for_library(path: object) -> str:
    """A path as a library takes it.

    Raises:
        ConfigurationError: a name in it is not UTF-8, so that no library could open it.
    """
    try:
        return str(path).encode(errors="surrogateescape").decode()
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"{decoded(path)}: a name in this path is not UTF-8, which libraries cannot open; rename it"
        ) from None
