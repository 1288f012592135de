"""Options of a URL: `name=value` behind its `?`, with `&` between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

from inference_session.errors import ConfigurationError
from inference_session.platform.file_names import as_file_name

PASSWORD_FILE = "password_file"  # noqa: S105  a name
"""The option that names a file with a password, as Kubernetes and Docker provide secrets."""
_MAX_SECRET_BYTES = 4096


def url_options(scheme: str, query: str, allowed: Sequence[str]) -> dict[str, str]:
    """The options in a query; ConfigurationError names the first that is not allowed."""
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(allowed))
    if unknown:
        names = ", ".join(allowed) or "none"
        raise ConfigurationError(f"a {scheme}:// URL has the unknown option {unknown[0]!r}; allowed: {names}")
    return options


def as_query(options: Mapping[str, str]) -> str:
    """The end of a URL with these options; empty if there are none."""
    return "".join(f"{'&' if i else '?'}{name}={value}" for i, (name, value) in enumerate(options.items()))


def url_password(given: str | None, options: Mapping[str, str]) -> str | None:
    """The password of a URL: `given`, its own password, or the content of the file that its options name.

    ConfigurationError where both exist, or the file cannot be used; it never shows the file's content.
    """
    path = options.get(PASSWORD_FILE)
    if path is None:
        return given
    if given:
        raise ConfigurationError(
            f"a URL has both a password and {PASSWORD_FILE} {path!r}; remove the password from the URL"
        )
    return read_secret(Path(path))


def read_secret(path: Path) -> str:
    """The content of a file, without the end of its line; ConfigurationError where that is no password."""
    if not path.is_absolute():
        raise ConfigurationError(f"{PASSWORD_FILE} cannot be {str(path)!r}; allowed: an absolute path")
    try:
        with Path(as_file_name(str(path))).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 1).decode("utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(
            f"{PASSWORD_FILE} {str(path)!r} cannot be read: {reason}"
        ) from None  # shows what was read
    if not secret or len(secret) > _MAX_SECRET_BYTES or not secret.isprintable():
        raise ConfigurationError(
            f"{PASSWORD_FILE} {str(path)!r}: expected one line with a password of up to {_MAX_SECRET_BYTES} characters"
        )
    return secret
