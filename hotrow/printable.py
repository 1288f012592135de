"""Names that others have given, as they may be shown: whatever they hold, neither a terminal nor rich must obey it."""

from __future__ import annotations

from rich.markup import escape


def printable(text: str) -> str:
    """The text without control characters, but for ends of lines."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_cell(text: str) -> str:
    """The text for a cell of a rich table, or anywhere else where rich looks for markup."""
    return escape(printable(text))
