"""Readers of single values of ps.json: as lenient as HugeCTR about spelling, strict about meaning.

Each takes a value from JSON and returns the converted value; a ValueError says what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from inference_session.platform.json_records import is_text

Value = TypeVar("Value")
Reader = Callable[[Any], Value]


FLOAT32_MAX = 3.4028234663852886e38


def text(value: Any) -> str:
    """A string that can be a name or a path: JSON allows some that no file system and no ONNX file accepts."""
    if not isinstance(value, str):
        raise ValueError("allowed: a string")
    if "\0" in value or not is_text(value):
        raise ValueError("allowed: a string without NUL characters and unpaired surrogates")
    return value


def flag(value: Any) -> bool:
    """A truth value, also as a string or as 1 or 0."""
    spelled = {"true": True, "1": True, "false": False, "0": False}
    name = str(value).strip().lower()
    if not isinstance(value, (bool, int, str)) or name not in spelled:
        raise ValueError("allowed: true or false")
    return spelled[name]


def number(low: float, high: float = math.inf) -> Reader[float]:
    """A number in [low, high], also as a string."""

    def read(value: Any) -> float:
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not low <= found <= high or math.isinf(found):
            limit = f"from {low:g} to {high:g}" if high < math.inf else f"from {low:g}"
            raise ValueError(f"allowed: numbers {limit}")
        return found

    return read


def whole(low: int, high: int = 2**63 - 1) -> Reader[int]:
    """A whole number in [low, high], also as a string or as a float without fraction."""

    def read(value: Any) -> int:
        try:
            found = int(value) if isinstance(value, str) else value
        except ValueError:
            found = None
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            limit = f"from {low} to {high}" if high < 2**63 - 1 else f"from {low}"
            raise ValueError(f"allowed: whole numbers {limit}")
        return found

    return read


def choice(spellings: Mapping[str, str]) -> Reader[str]:
    """One of several words; case, spaces and dashes do not count."""

    def read(value: Any) -> str:
        name = str(value).strip().lower().replace(" ", "_").replace("-", "_")
        if not isinstance(value, str) or name not in spellings:
            raise ValueError(f"allowed: {', '.join(spellings)}")
        return spellings[name]

    return read


def list_of(read_one: Reader[Value]) -> Reader[tuple[Value, ...]]:
    """A list; the given reader reads each element."""

    def read(value: Any) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise ValueError("allowed: a list")
        return tuple(read_one(item) for item in value)

    return read
