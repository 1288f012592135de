"""Reads JSON documents into frozen dataclasses: the types of the fields say what each value must be.

Errors are ValueErrors that name the field by its place in the document, such as `tables[0].num_rows`.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_JSON_BYTES = 256 << 20
"""The largest document that is read."""
LARGEST_INTEGER = 2**63 - 1
"""Compiled code and files have integers of 64 bits."""

Record = TypeVar("Record")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError also for an object with two fields of one name.

    NaN and infinities are left to `read_record`, which names the field.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def own_fields(text: str | bytes | None) -> dict[str, Any]:
    """The fields of a JSON object that hotrow has written for itself; {} where the text is something else."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_record(kind: Callable[..., Record], value: object, place: str = "") -> Record:
    """A dataclass from a parsed JSON object; `place` is where the object stands in its document, empty for the top.

    Fields may be strings, numbers, truth values, literals, tuples, mappings by name, dataclasses, or one of several of
    these; None stands for null, and Any for whatever JSON has. Fields with a default may be absent.

    Raises:
        ValueError: a field is unknown, missing or of another type; the message names its place.
    """
    document = _expect(isinstance(value, dict), value, place, "an object")
    types = _field_types(kind)
    if unknown := sorted(document.keys() - types.keys()):
        raise ValueError(f"unknown field {_at(place, unknown[0])!r}; known: {', '.join(sorted(types))}")
    if missing := sorted(_required(kind) - document.keys()):
        raise ValueError(f"field {_at(place, missing[0])!r} is missing")
    return kind(**{name: read_value(types[name], item, _at(place, name)) for name, item in document.items()})


def read_value(kind: Any, value: object, place: str) -> Any:
    """A value of a type that a field of `read_record` may have; ValueError names its place."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        return read_record(kind, value, place)  # type: ignore[arg-type]  # it is a class
    if kind in _SCALARS:
        is_valid, name = _SCALARS[kind]
        return _expect(is_valid(value), value, place, name)
    return _READERS[get_origin(kind)](kind, value, place)


@cache
def _field_types(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _expect(is_valid: bool, value: Any, place: str, name: str) -> Any:
    if not is_valid:
        where = f"field {place!r}: " if place else ""
        raise ValueError(f"{where}expected {name}, found {reprlib.repr(value)}")
    return value


def is_text(value: object) -> bool:
    """A string that UTF-8 can express: JSON may escape half a character."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST_INTEGER


def _is_number(value: object) -> bool:
    return _is_integer(value) or (type(value) is float and math.isfinite(value))


_SCALARS: Mapping[Any, tuple[Callable[[object], bool], str]] = {
    str: (is_text, "a string"),
    int: (_is_integer, "a whole number of at most 64 bits"),
    float: (_is_number, "a finite number"),
    bool: (lambda value: type(value) is bool, "true or false"),
}


def _read_literal(kind: Any, value: object, place: str) -> object:
    allowed = get_args(kind)
    is_valid = isinstance(value, str) and value in allowed
    return _expect(is_valid, value, place, f"one of {', '.join(map(repr, allowed))}")


def _read_union(kind: Any, value: object, place: str) -> object:
    """By the type among several that JSON shows: null, a list, or anything else, where the last one is reported."""
    kinds = [one for one in get_args(kind) if one is not NoneType]
    if value is None and len(kinds) < len(get_args(kind)):
        return None
    fitting = [one for one in kinds if isinstance(value, list) == (get_origin(one) is tuple)] or kinds
    for one in fitting[:-1]:
        with contextlib.suppress(ValueError):
            return read_value(one, value, place)
    return read_value(fitting[-1], value, place)


def _read_tuple(kind: Any, value: object, place: str) -> tuple[Any, ...]:
    items = _expect(isinstance(value, list), value, place, "a list")
    types = get_args(kind)
    if types[-1] is ...:
        types = (types[0],) * len(items)
    _expect(len(items) == len(types), value, place, f"a list of {len(types)}")
    return tuple(
        read_value(one, item, f"{place}[{number}]") for number, (one, item) in enumerate(zip(types, items, strict=True))
    )


def _read_mapping(kind: Any, value: object, place: str) -> dict[str, Any]:
    document = _expect(isinstance(value, dict), value, place, "an object")
    return {name: read_value(get_args(kind)[1], item, _at(place, name)) for name, item in document.items()}


_READERS: Mapping[Any, Callable[[Any, object, str], Any]] = {
    Literal: _read_literal,
    Union: _read_union,
    UnionType: _read_union,
    tuple: _read_tuple,
    Mapping: _read_mapping,
}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object has two fields of the name {name!r}")
        found[name] = value
    return found
