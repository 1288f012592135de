"""Text for people: numbers with units, and untrusted names, which neither a terminal nor rich may interpret."""

from __future__ import annotations


def in_units(num_bytes: int) -> str:
    """A number of bytes as text, for example `1.50 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size == round(size) else f"{size:.2f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 model`, `2 models`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_words(error: Exception) -> str:
    """An error in one line: that of a file system without its number."""
    if isinstance(error, OSError) and error.strerror:
        names = filter(None, (error.filename, error.filename2))  # two of a copy or a link
        return ": ".join(filter(None, (" -> ".join(map(str, names)), error.strerror)))
    return str(error)


def printable(text: str) -> str:
    """The text without control characters other than line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_cell(text: str) -> str:
    """The text for a cell of a rich table, or any other text that rich parses for markup."""
    from rich.markup import escape  # loaded where it is needed: not every command shows tables

    return escape(printable(text))
