"""Makes untrusted names safe to show: neither a terminal nor rich may interpret their content."""

from __future__ import annotations

from rich.markup import escape


def printable(text: str) -> str:
    """The text without control characters other than line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_cell(text: str) -> str:
    """The text for a cell of a rich table, or any other text that rich parses for markup."""
    return escape(printable(text))
