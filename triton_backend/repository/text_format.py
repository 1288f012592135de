"""The part of Protobuf's text format that model configurations use, without a schema.

Triton's own schema comes only with its client, and hotrow reads only a few fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

Message = dict[str, list[Any]]
"""Each field's values in order: QuotedValue for a string, str for a number or word, a Message for a message."""


class QuotedValue(str):
    """A value that was in quotes."""

    __slots__ = ()


_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<word>[\w.+-]+)
      | (?P<punctuation>[{}\[\]<>:,;])""",
    re.VERBOSE,
)
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})")
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_CLOSING = {"{": "}", "<": ">"}
_MAX_DEPTH = 50


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse(text: str) -> Message:
    """The fields of a message in text format; ValueError names the invalid line."""
    tokens = [*_tokens(text), _Token("end", "the end of the file", text.count("\n") + 1)]
    tokens.reverse()
    return _message(tokens, "end", depth=0)


def write(message: Message) -> str:
    """The text of a message; `parse` gives it back."""
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Message) -> Iterator[str]:
    for name, values in message.items():
        for value in values:
            if isinstance(value, dict):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(value))
                yield "}"
            else:
                yield f"{name}: {quoted(value) if isinstance(value, QuotedValue) else value}"


def quoted(text: str) -> str:
    """A string as the text format writes it."""
    escaped = "".join(f"\\{ord(c):03o}" if ord(c) < 32 or c == "\x7f" else c for c in text.replace("\\", "\\\\"))
    return '"' + escaped.replace('"', '\\"') + '"'


def integer(field: str, value: object) -> int:
    """The number that a value of this field is; ValueError names the field."""
    if not isinstance(value, str) or not _INTEGER.fullmatch(value):
        found = "a message" if isinstance(value, dict) else repr(value[:40] if isinstance(value, str) else value)
        raise ValueError(f"field {field!r} must be a whole number of at most 64 bits, found {found}")
    return int(value, 16 if "x" in value.lower() else 10)


def _tokens(text: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"line {line}: unexpected {text[position]!r}")
        if match.lastgroup != "space":
            yield _Token(match.lastgroup or "", match.group(), line)
        line += match.group().count("\n")
        position = match.end()


def _message(tokens: list[_Token], closing: str, depth: int) -> Message:
    """Read fields up to the closing bracket (`end`: of the file), which is consumed as well."""
    fields: Message = {}
    while True:
        token = tokens.pop()
        if token.text == closing or (token.kind == closing == "end"):
            return fields
        if token.kind != "word":
            raise ValueError(f"line {token.line}: expected the name of a field, found {token.text}")
        if _skip(tokens, ":") is None and tokens[-1].text not in ("{", "<", "["):
            raise ValueError(f"line {token.line}: field {token.text!r} has no value")
        fields.setdefault(token.text, []).extend(_values(tokens, depth))
        _ = _skip(tokens, ",") or _skip(tokens, ";")


def _values(tokens: list[_Token], depth: int) -> list[Any]:
    if _skip(tokens, "[") is None:
        return [_value(tokens, depth)]
    values: list[Any] = []
    while _skip(tokens, "]") is None:
        values.append(_value(tokens, depth))
        if _skip(tokens, ",") is None and tokens[-1].text != "]":
            raise ValueError(f"line {tokens[-1].line}: expected ',' or ']', found {tokens[-1].text}")
    return values


def _value(tokens: list[_Token], depth: int) -> Any:
    token = tokens.pop()
    if token.text in _CLOSING:
        if depth == _MAX_DEPTH:
            raise ValueError(f"line {token.line}: messages nested more than {_MAX_DEPTH} deep")
        return _message(tokens, _CLOSING[token.text], depth + 1)
    if token.kind == "word":
        return token.text
    if token.kind != "string":
        raise ValueError(f"line {token.line}: expected a value, found {token.text}")
    text = _unquoted(token.text)
    while tokens[-1].kind == "string":  # adjacent strings are one
        text += _unquoted(tokens.pop().text)
    return QuotedValue(text)


def _skip(tokens: list[_Token], text: str) -> _Token | None:
    return tokens.pop() if tokens[-1].kind == "punctuation" and tokens[-1].text == text else None


def _unquoted(literal: str) -> str:
    return _ESCAPE.sub(_unescaped, literal[1:-1].encode()).decode(errors="replace")


def _unescaped(match: re.Match[bytes]) -> bytes:
    escape = match.group(1)
    if escape[:1].isdigit():
        return bytes([int(escape, 8) & 0xFF])
    if escape[:1] in b"xX" and len(escape) > 1:
        return bytes([int(escape[1:], 16)])
    return _LETTERS.get(escape, escape)
