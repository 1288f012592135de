"""Checks of arguments. Errors name the argument, what was given, and what is allowed."""

from __future__ import annotations

from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from inference_session.errors import ConfigurationError

_Member = TypeVar("_Member", bound=Enum)


def check(is_good: bool, name: str, value: Any, allowed: str) -> None:
    """ConfigurationError unless the value of an argument is good."""
    if not is_good:
        raise ConfigurationError(f"{name} is {value!r}; allowed: {allowed}")


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, and not a truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_from(lowest: float, value: Any) -> bool:
    """Whether a value is a number, no less than the lowest allowed."""
    return not isinstance(value, bool) and isinstance(value, Real) and float(value) >= lowest


def whole(name: str, value: Any, lowest: int = 1) -> int:
    """A whole number, no less than the lowest allowed."""
    check(is_whole(value) and value >= lowest, name, value, f"whole numbers from {lowest}")
    return int(value)


def number(name: str, value: Any, lowest: float = 0, below: float | None = None) -> None:
    """ConfigurationError unless it is a number of these."""
    is_good = is_from(lowest, value) and (below is None or value < below)
    check(is_good, name, value, f"numbers from {lowest}" + ("" if below is None else f" below {below}"))


def member(name: str, value: Any, kind: type[_Member]) -> _Member:
    """A member of an enumeration."""
    if not isinstance(value, kind):
        check(False, name, value, ", ".join(f"{kind.__name__}.{item.name}" for item in kind))
    return value
