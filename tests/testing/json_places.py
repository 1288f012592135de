"""Places in documents of JSON, for tests that damage them: names of fields and positions in lists, from the top."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias

Place: TypeAlias = "tuple[str | int, ...]"


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Every field and list element of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield (*above, key)
        yield from places(inner, (*above, key))


def holder(document: Any, place: Place) -> Any:
    """The object or list that has the place."""
    return reduce(getitem, place[:-1], document)


def setting(*place: str | int, value: Any) -> Callable[[Any], None]:
    """A change of a document: another value in a place."""

    def change(document: Any) -> None:
        holder(document, place)[place[-1]] = value

    return change


def dropping(*place: str | int) -> Callable[[Any], None]:
    """A change of a document: nothing in a place."""

    def change(document: Any) -> None:
        del holder(document, place)[place[-1]]

    return change
