"""JSON files of HugeCTR, with the line of any field for messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from inference_session.errors import HotrowError
from inference_session.platform.small_files import read_regular_file

MAX_FILE_BYTES = 64 << 20

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)

FieldPath = tuple[str | int, ...]
"""Where a value stands: names of objects' fields and positions in lists, from the top."""


@dataclass(frozen=True)
class JsonFile:
    """A file that was read as JSON; `error` is the type of the errors about its content."""

    path: Path
    text: str
    document: dict[str, Any]
    error: type[HotrowError]

    def line_of(self, field: FieldPath) -> int:
        """The line on which a field (or the nearest existing one above it) is written, from 1."""
        best, length = 0, 0
        for position, at in _fields(self.text):
            if len(at) >= length and at == field[: len(at)]:
                best, length = position, len(at)
                if at == field:
                    break
        return self.text.count("\n", 0, best) + 1

    def fail(self, field: FieldPath, message: str) -> NoReturn:
        """Raise the file's error: file, line, field, then the message."""
        raise self.error(f"{self.path}:{self.line_of(field)}: field {field_name(field)}: {message}")


def field_name(field: FieldPath) -> str:
    """The field as a person writes it: `'models[0].gpucache'`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
    return repr(text.removeprefix("."))


def shown(value: object) -> str:
    """A value for a message, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path, error: type[HotrowError]) -> JsonFile:
    """Read a file whose top is an object; `error` names the file and, where known, the line."""
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path}: cannot be read as text: {getattr(cause, 'strerror', None) or cause}") from cause
    try:
        document = json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as cause:
        # The parser reports a missing comma at the next word.
        raise error(f"{path}:{cause.lineno}: not valid JSON: {cause.msg} (column {cause.colno})") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: not valid JSON: {cause}") from cause
    if not isinstance(document, dict):
        raise error(f"{path}: expected an object at the top, found {type(document).__name__}")
    return JsonFile(path, text, document, error)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _fields(text: str) -> Iterator[tuple[int, FieldPath]]:
    """Every field and list element of a valid JSON text: its position, and its path from the top."""
    path: list[str | int] = []
    in_object: list[bool] = []
    key_is_next = False
    for match in _PART.finditer(text):
        part = match.group()
        if part in "}]":
            in_object.pop()
            path.pop()
        elif part == ",":
            key_is_next = in_object[-1]
            if not key_is_next:
                path[-1] = int(path[-1]) + 1
        elif key_is_next:
            path[-1] = json.loads(part)
            key_is_next = False
            yield match.start(), tuple(path)
        elif part != ":":
            if in_object and not in_object[-1]:
                yield match.start(), tuple(path)
            if part in "{[":
                in_object.append(part == "{")
                path.append(0)
                key_is_next = part == "{"
