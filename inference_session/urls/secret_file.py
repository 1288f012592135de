"""Passwords in separate files, as Kubernetes and Docker provide secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inference_session.errors import ConfigurationError
from inference_session.platform.file_names import as_file_name

OPTION = "password_file"
"""The option of URLs that names such a file."""
MAX_BYTES = 4096


def url_password(given: str | None, options: Mapping[str, str]) -> str | None:
    """The password of a URL: `given`, its own password, or the content of the file that its options name.

    ConfigurationError where both exist, or the file cannot be used; it never shows the file's content.
    """
    path = options.get(OPTION)
    if path is None:
        return given
    if given:
        raise ConfigurationError(f"a URL has both a password and {OPTION} {path!r}; remove the password from the URL")
    return read_secret(Path(path))


def read_secret(path: Path) -> str:
    """The content of a file, without the end of its line; ConfigurationError where that is no password."""
    if not path.is_absolute():
        raise ConfigurationError(f"{OPTION} cannot be {str(path)!r}; allowed: an absolute path")
    try:
        with Path(as_file_name(str(path))).open("rb") as file:
            secret = file.read(MAX_BYTES + 1).decode("utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{OPTION} {str(path)!r} cannot be read: {reason}") from None  # shows what was read
    if not secret or len(secret) > MAX_BYTES or not secret.isprintable():
        raise ConfigurationError(
            f"{OPTION} {str(path)!r}: expected one line with a password of up to {MAX_BYTES} characters"
        )
    return secret
